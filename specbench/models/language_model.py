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
from specbench.decoding.noise import constant
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Draft, Rows, State, Verdict, seen_tokens
from specbench.decoding.tree import Tree, pack, tree_of
from specbench.executors.eager import EagerExecutor
from specbench.settings import ConfigError

READ_CHUNK = 2048  # tokens per row and forward where nothing else says how much


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
        self.tokenizer, self.name = tokenizer, name
        self.sampling, self.new_cache, self.chat_template = sampling, new_cache, chat_template
        self.config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
        weight = next(module.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.weight_bytes = sum(p.nbytes for p in module.parameters())
        self.operations_per_token = _operations_per_token(module)
        self.step_bytes = self.operations_per_token * weight.element_size()  # weights that a step reads
        self.window = self._sliding_window()
        self.can_skip_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        self.executor, self.module = executor, executor.load(module)
        self.cache: SlotCache | None = None
        self.cached: list[int] = []  # leading columns of each row that are read
        self.width = 1  # tokens per row of the last score
        self.place: Tensor | None = None  # [B, N + 1], where the last score put a draft's entries
        self.watched, self.head_input, self.hidden = False, None, None

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

    @property
    def column_bytes(self) -> float:
        """Bytes of one position's keys and values."""
        return self.cache.column_bytes()

    def allocate(self, rows: int, columns: int) -> None:
        """An empty cache of at least `columns` positions for each of `rows` rows. One that is there
        and fits is used again, at the same addresses."""
        cache = self.cache
        if cache is None or cache.rows != rows or cache.capacity < columns or not cache.fixed_shapes:
            self.cache = None  # before the next one takes its memory
            self.cache = self.new_cache(rows, self.executor.columns(columns))
        else:
            cache.clear()
        self.cached = [0] * rows

    def prefill(self, state: State, upto: int | None = None, start: int = 0, chunk: int = READ_CHUNK) -> None:
        """Reads committed tokens of all rows into the cache, all but the last of each row, and no
        logits. Rows are padded on the right: what a shorter row writes beyond its length is
        overwritten before any of its tokens can see it."""
        end = state.longest - 1 if upto is None else upto
        for begin in range(start, end, chunk):
            tokens = state.tokens[:, begin : min(begin + chunk, end)]
            visible = self.make_room([begin] * len(self.cached), tokens.shape[1])
            self.forward(tokens, torch.full_like(state.length, begin), visible, keep_logits=1)
        self.cached = [min(end, length - 1) for length in state.lengths]

    def catch_up(self, state: State, width: int) -> None:
        """Reads committed tokens of active rows until at most `width` of each are not in the cache."""
        rows = zip(state.lengths, self.cached, state.active, strict=True)
        behind = [row for row, (length, cached, on) in enumerate(rows) if on and length - cached > width]
        if len(behind) == state.batch_size:
            self.prefill(state, start=min(self.cached))
        else:
            for row in behind:
                self.read(state, row, self.cached[row], state.lengths[row] - 1)

    def read(self, state: State, row: int, begin: int, end: int) -> None:
        """Reads the committed tokens begin .. end - 1 of one row; the others are left alone."""
        self.read_row(state.tokens[row : row + 1], row, begin, end, keep_logits=1)

    def read_row(self, text: Tensor, row: int, begin: int, end: int, keep_logits: int = 0) -> Tensor:
        """Reads the tokens begin .. end - 1 of a text [1, T] into one row of the cache; logits
        [1, end - begin, V] unless only the last `keep_logits` are wanted."""
        self.cached[row] = begin
        self.cache.truncate(self.cached)
        self.cache.reserve([end if r == row else 0 for r in range(self.cache.rows)])
        visible = self.executor.columns(end, self.cache.capacity)
        first = torch.full((1,), begin, device=self.device)
        logits = self.forward(text[:, begin:end], first, visible, row=row, keep_logits=keep_logits)
        self.cached[row] = end
        return logits

    def logits(self, tokens: Tensor, starts: Sequence[int], draft: Draft | None = None) -> Tensor:
        """Logits [B, N, V] of tokens [B, N] that begin at position starts[b] of each row.

        What the cache held at and beyond `starts` is forgotten first: this is the rollback.
        """
        visible = self.make_room(starts, tokens.shape[1])
        tree = None if draft is None or draft.is_chain else constant(tree_of)(draft.parent, tokens.device)
        return self.forward(tokens, torch.tensor(list(starts), device=self.device), visible, tree=tree)

    def score(self, state: State, draft: Draft) -> Tensor:
        """p [B, N+1, V]: the target's distributions after the last committed token, and after each
        guess, from one forward on all of them. Guesses that say the same are read once."""
        tokens, tree, self.place = draft.tokens, draft.parent, None
        if draft.repeats and not self.executor.fixed_shapes:
            packed = pack(draft.tokens, draft.parent, draft.count)
            tokens, tree, self.place = packed.tokens, packed.tree, packed.place
        self.width = tokens.shape[1] + 1
        visible = self.make_room([n - 1 for n in state.lengths], self.width, state.active)
        p, self.hidden = self.executor.leaf(self._score, self)(state.rows, tokens, visible, tree)
        return p if self.place is None else p[torch.arange(len(p), device=p.device)[:, None], self.place]

    def _score(
        self, rows: Rows, guesses: Tensor, visible: int, parent: tuple[int, ...] | Tree
    ) -> tuple[Tensor, Tensor | None]:
        text, length = rows.tokens, rows.length
        last = text.gather(1, length[:, None] - 1)
        chain = parent == tuple(range(-1, guesses.shape[1] - 1))
        tree = parent if isinstance(parent, Tree) else None if chain else constant(tree_of)(parent, text.device)
        logits = self.forward(torch.cat([last, guesses], 1), length - 1, visible, tree=tree)
        penalised = self.sampling.repetition_penalty != 1
        seen = self._seen(text, length, guesses, tree) if penalised else None
        return self.sampling.probabilities(logits, seen), self.head_input

    def keep_path(self, path: Tensor, base: Tensor) -> None:
        """Moves the keys and values of a tree's accepted nodes [B, D] to where a chain's would be; base
        [B] is the column of the first node."""
        entries = path if self.place is None else self.place.gather(1, path + 1) - 1
        self.executor.leaf(self._keep_path, self)(entries, base)

    def _keep_path(self, entries: Tensor, base: Tensor) -> None:
        self.cache.commit(entries, base)

    def keep_hidden(self) -> None:
        """From now on `hidden` [B, N+1, H] of a score is what its output matrix was applied to."""
        if not self.watched:
            self.watched = True
            head = self.module.get_output_embeddings()
            head.register_forward_pre_hook(lambda _, given: setattr(self, "head_input", given[0]))

    def hidden_after(self, verdict: Verdict) -> Tensor:
        """[B, H], the hidden state behind the token t of a verdict: of its last accepted guess."""
        n = verdict.accepted
        entry = n
        if verdict.path is not None and verdict.path.shape[1]:
            node = verdict.path.gather(1, (n - 1).clamp(min=0)[:, None])[:, 0]
            entry = torch.where(n > 0, node + 1, 0)
            if self.place is not None:
                entry = self.place.gather(1, entry[:, None])[:, 0]
        return self.hidden[torch.arange(len(n), device=n.device), entry]

    def make_room(self, starts: Sequence[int], width: int, active: Sequence[bool] | None = None) -> int:
        """Rolls the cache back to `starts`, so that `width` tokens can follow in the active rows;
        returns how many columns attention has to see."""
        on = active or [True] * len(starts)
        self.cached = [s if a else c for s, c, a in zip(starts, self.cached, on, strict=True)]
        self.cache.truncate(self.cached)
        self.cache.reserve([s + width if a else 0 for s, a in zip(starts, on, strict=True)])
        self.cached = [s + width if a else c for s, c, a in zip(starts, self.cached, on, strict=True)]
        return self.executor.columns(max(starts) + width, self.cache.capacity)

    def forward(
        self,
        tokens: Tensor,
        first: Tensor,
        visible: int,
        row: int | None = None,
        tree: Tree | None = None,
        keep_logits: int = 0,
    ) -> Tensor:
        """Logits of tokens [b, N], or of their embeddings [b, N, H], at positions first[b],
        first[b] + 1, ... or, in a tree, by depth.

        Only tensor operations: an executor may compile it, or capture it in a CUDA graph.
        """
        slots = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.cache.place(slots, visible, row)
        root = first if tree is None else first - (tree.sees.shape[2] - tokens.shape[1])  # column of entry 0
        positions = slots if tree is None else root[:, None] + tree.depth
        if visible > self.context:  # guesses of rows that are idle, which nobody reads
            positions = positions.clamp(max=self.context - 1)
        output = self.module(
            **{"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens},
            position_ids=positions,
            attention_mask=self._mask(slots, root, visible, tree),
            past_key_values=self.cache,
            use_cache=True,
            **({"logits_to_keep": keep_logits} if self.can_skip_logits else {}),
        )
        return output.logits

    def _mask(self, slots: Tensor, root: Tensor, visible: int, tree: Tree | None):
        """Which columns each new token sees, [B, 1, N, columns]: every earlier one of its row, and
        in a tree only its ancestors among the entries of the tree."""
        columns = torch.arange(visible, device=slots.device)
        if tree is None:
            seen = columns <= slots[:, :, None]
        else:
            B, N, M = len(slots), slots.shape[1], tree.sees.shape[2]
            relative = columns - root[:, None]  # [B, columns], column of entry 0 is 0
            entry = relative.clamp(0, M - 1)[:, None].expand(B, N, visible)
            ancestors = tree.sees.expand(B, N, M).gather(2, entry) & (relative < M)[:, None]
            seen = torch.where((relative >= 0)[:, None], ancestors, True)
        seen = seen[:, None]
        if self.window is None:
            return self._as_attention_bias(seen)
        places = slots if tree is None else root[:, None] + tree.depth
        near = seen & (columns > places[:, None, :, None] - self.window)
        if not isinstance(getattr(self.config, "layer_types", None), list):
            return self._as_attention_bias(near)
        masks = {"full_attention": seen, "sliding_attention": near}
        if len(set(self.config.layer_types)) == 1:
            return self._as_attention_bias(masks[self.config.layer_types[0]])
        return {kind: self._as_attention_bias(mask) for kind, mask in masks.items()}

    def _as_attention_bias(self, visible: Tensor) -> Tensor:
        """SDPA takes booleans; the eager attention of transformers adds the mask to its scores."""
        if getattr(self.config, "_attn_implementation", "sdpa") != "eager":
            return visible
        hidden = torch.finfo(self.dtype).min
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill(~visible, hidden)

    def _seen(self, text: Tensor, length: Tensor, guesses: Tensor, tree: Tree | None) -> Tensor:
        """[B, N+1, V]: the repetition penalty's context grows with each guess on the path."""
        committed = seen_tokens(text, length, self.vocab_size)[:, None, :]
        if not guesses.shape[1]:
            return committed
        if tree is None:
            tree = constant(tree_of)(tuple(range(-1, guesses.shape[1] - 1)), text.device)
        hot = nn.functional.one_hot(guesses, self.vocab_size).float()  # [B, N, V]
        return committed | (tree.sees[..., 1:].float() @ hot > 0)

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


def _operations_per_token(module: nn.Module) -> int:
    """Multiply-adds with weights in one forward of one token: what c_hat compares."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    inputs = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    packed = [m.packed for m in module.modules() if hasattr(m, "packed")]
    total = sum(weight.numel() for weight in (*module.parameters(), *packed))
    tied = inputs is not None and getattr(head, "weight", None) is inputs.weight
    return total if tied or inputs is None else total - inputs.weight.numel()
