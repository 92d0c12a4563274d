"""The adapter between the decoder and any Hugging Face causal language model.

It adds what `generate` hides: ragged rows (each with its own length), exact rollback, and token
trees, through explicit positions, cache columns and a 4-D attention mask. The modelling code of
transformers runs unmodified.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from specbench.cache.slots import SlotCache
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Draft, State
from specbench.executors.eager import EagerExecutor
from specbench.settings import ConfigError

PREFILL_CHUNK = 2048  # tokens per row and forward while a prompt is read


class LanguageModel:
    """A model, its tokenizer, its cache and the standardization of its logits (section 2.2)."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer,
        *,
        name: str,
        sampling: Sampling,
        new_cache: Callable[[int, int], SlotCache],
        executor: EagerExecutor,
        chat_template: bool = False,
    ):
        self.module, self.tokenizer, self.name = module, tokenizer, name
        self.sampling, self.new_cache, self.chat_template = sampling, new_cache, chat_template
        self.config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
        self.device = next(module.parameters()).device
        self.run = executor.prepare(module)
        self.cache: SlotCache | None = None
        self.columns = torch.empty(0)  # 0, 1, 2, ... to the cache's capacity
        self.window = self._sliding_window()
        self.can_skip_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """Positions the model was made for."""
        return self.config.max_position_embeddings

    @cached_property
    def stop_tokens(self) -> list[int]:
        """End-of-sequence ids of the generation config, the config and the tokenizer."""
        ids: set[int] = set()
        for source in (getattr(self.module, "generation_config", None), self.config, self.tokenizer):
            found = getattr(source, "eos_token_id", None)
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        return sorted(ids)

    @cached_property
    def operations_per_token(self) -> int:
        """Multiply-adds with weights in one forward of one token: what c_hat compares."""
        head = self.module.get_output_embeddings() if hasattr(self.module, "get_output_embeddings") else None
        inputs = self.module.get_input_embeddings() if hasattr(self.module, "get_input_embeddings") else None
        total = sum(p.numel() for p in self.module.parameters())
        tied = head is not None and inputs is not None and head.weight is inputs.weight
        return total if tied or inputs is None else total - inputs.weight.numel()

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.module.parameters())

    def allocate(self, batch_size: int, columns: int) -> None:
        """A fresh cache of at most `columns` positions for each of `batch_size` rows."""
        self.cache = self.new_cache(batch_size, columns)
        self.columns = torch.arange(columns, device=self.device)

    def prefill(self, state: State, upto: int | None = None, start: int = 0) -> None:
        """Reads committed tokens into the cache, all but the last of each row, and no logits.

        Rows are padded on the right: what a shorter row writes beyond its length is overwritten
        before any of its tokens can see it.
        """
        end = state.longest - 1 if upto is None else upto
        for begin in range(start, end, PREFILL_CHUNK):
            chunk = state.tokens[:, begin : min(begin + PREFILL_CHUNK, end)]
            self._forward(chunk, [begin] * state.batch_size, keep_logits=1)

    def logits(self, tokens: Tensor, starts: Sequence[int], draft: Draft | None = None) -> Tensor:
        """Logits [B, N, V] of tokens [B, N] that begin at position starts[b] of each row.

        What the cache held at and beyond `starts` is forgotten first: this is the rollback.
        """
        return self._forward(tokens, starts, draft)

    def score(self, state: State, draft: Draft) -> Tensor:
        """p_1 .. p_{N+1}: the target's distributions before each guess and after the last
        [B, N+1, V], from one forward on the last committed token and the draft."""
        last = state.tokens.gather(1, state.length[:, None] - 1)
        logits = self.logits(torch.cat([last, draft.tokens], 1), [n - 1 for n in state.lengths], draft)
        return self.sampling.probabilities(logits, self._seen(state, draft))

    def _forward(
        self, tokens: Tensor, starts: Sequence[int], draft: Draft | None = None, keep_logits: int = 0
    ) -> Tensor:
        self.cache.truncate(starts)
        width = tokens.shape[1]
        first = torch.tensor(starts, device=self.device)[:, None]
        slots = first + self.columns[:width]
        self.cache.place(slots, starts)
        tree = None if draft is None or draft.is_chain else draft.parent
        positions = slots if tree is None else first + tree_depth(tree).to(self.device)
        if self.cache.visible > self.context:  # guesses of rows that are done, which nobody reads
            positions = positions.clamp(max=self.context - 1)
        output = self.run(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._mask(slots, tree),
            past_key_values=self.cache,
            use_cache=True,
            **({"logits_to_keep": keep_logits} if self.can_skip_logits else {}),
        )
        return output.logits

    def _mask(self, slots: Tensor, tree: tuple[int, ...] | None):
        """Which columns each new token sees, [B, 1, N, columns]: every earlier one of its row, and
        in a tree only its ancestors among the new ones."""
        columns = self.columns[: self.cache.visible]
        if tree is None:
            visible = columns <= slots[:, :, None]
        else:
            relative = columns - slots[:, :1]  # [B, columns], column of the first new token is 0
            inside = (relative >= 0)[:, None, :]
            ancestors = tree_ancestors(tree).to(self.device)[:, relative.clamp(0, len(tree))]
            visible = torch.where(inside, ancestors.transpose(0, 1), True)
        visible = visible[:, None]
        if self.window is None:
            return self._as_attention_bias(visible)
        near = visible & (columns > slots[:, None, :, None] - self.window)
        if not isinstance(getattr(self.config, "layer_types", None), list):
            return self._as_attention_bias(near)
        masks = {"full_attention": visible, "sliding_attention": near}
        if len(set(self.config.layer_types)) == 1:
            return self._as_attention_bias(masks[self.config.layer_types[0]])
        return {kind: self._as_attention_bias(mask) for kind, mask in masks.items()}

    def _as_attention_bias(self, visible: Tensor) -> Tensor:
        """SDPA takes booleans; the eager attention of transformers adds the mask to its scores."""
        if getattr(self.config, "_attn_implementation", "sdpa") != "eager":
            return visible
        dtype = next(self.module.parameters()).dtype
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)

    def _seen(self, state: State, draft: Draft) -> Tensor | None:
        """[B, N+1, V]: the repetition penalty's context grows with each guess on the path."""
        if self.sampling.repetition_penalty == 1:
            return None
        committed = state.seen(self.vocab_size)[:, None, :]
        if not draft.tokens.shape[1]:
            return committed
        guesses = nn.functional.one_hot(draft.tokens, self.vocab_size).float()  # [B, N, V]
        on_path = tree_ancestors(draft.parent)[:, 1:].to(self.device, torch.float32)  # [N+1, N]
        return committed | (on_path @ guesses > 0)

    def _sliding_window(self) -> int | None:
        kinds = set(getattr(self.config, "layer_types", None) or [])
        if kinds - {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"target.path={self.name} has layers of kind {', '.join(sorted(kinds))}: "
                "only attention layers can be rolled back"
            )
        window = getattr(self.config, "sliding_window", None)
        uses = "sliding_attention" in kinds or (not kinds and getattr(self.config, "use_sliding_window", True))
        return window if uses else None


def tree_depth(parent: tuple[int, ...]) -> Tensor:
    """[N+1] distance from the last committed token, which is entry 0."""
    depth = [0]
    for node in parent:
        depth.append(depth[node + 1] + 1)
    return torch.tensor(depth)


def tree_ancestors(parent: tuple[int, ...]) -> Tensor:
    """[N+1, N+1] booleans: row i marks the entries on the path from the root to entry i, itself
    included; entry 0 is the last committed token."""
    size = len(parent) + 1
    ancestors = torch.eye(size, dtype=torch.bool)
    for node, above in enumerate(parent):
        ancestors[node + 1] |= ancestors[above + 1]
    return ancestors
