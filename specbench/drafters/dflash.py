"""DFlash (2602.06036): a published drafter guesses a block of tokens in one pass over masks, beside the target's hidden
states. B rows, T columns, F features of a position, K key heads, D head size, V vocabulary, S rows of a block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import Rows, last_tokens, window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.state import State
from specbench.decoding.transfers import counts
from specbench.drafters.base import OwnSampling
from specbench.drafters.dflash_config import DFlashConfig, read_dflash, refuse_other_target
from specbench.drafters.dflash_network import CONFIDENCE, DFlashNetwork, load_network, named_tensors
from specbench.drafters.parallel import ParallelDrafter
from specbench.drafters.tree_shapes import BlockTreeSettings
from specbench.errors import ConfigError
from specbench.models.checkpoint import MODEL, local_path
from specbench.models.heads import PartSettings
from specbench.models.intersection import DraftVocabulary
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context, load_config
from specbench.models.published import read_tensors
from specbench.models.sizes import stored
from specbench.models.vocabulary import VocabMap
from specbench.policies.base import GammaPolicy


class DFlashModel:
    """`module` runs with the target's executor. Column i of the context belongs to position i of the text; those of
    positions whose hidden states are not known yet hold nothing that is seen."""

    def __init__(self, module: DFlashNetwork, config: DFlashConfig, vocabulary: VocabMap, target: LanguageModel):
        """The target passes on what it reads of prompts from now on."""
        self.module, self.markov, self.config, self.vocabulary = module, module.markov_head, config, vocabulary
        self.executor, self.name = target.executor, target.name
        stock: Any = target.module
        theirs = (stock.get_input_embeddings(), stock.get_output_embeddings())
        own = {name: stored(part) for name, part in module.named_children()
               if not any(part is other for other in theirs)}  # fmt: skip
        self.weight_bytes = sum(size for _, size in own.values())
        self.weights = sum(count for name, (count, _) in own.items() if name not in ("embed_tokens", "lm_head"))
        self.context = torch.empty(0)
        self.unread: list[tuple[int | None, int, Tensor]] = []
        target.hidden_reader = self

    def cache_tensors(self) -> list[Tensor]:
        """As `on_cache`, what executors ask of a model with a cache."""
        return [self.context] if self.context.numel() else []

    @contextmanager
    def on_cache(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        own = self.context
        self.context = tensors[0]
        try:
            yield
        finally:
            self.context = own

    def take_hidden(self, row: int | None, begin: int, hidden: Tensor) -> None:
        """Keeps the hidden states [b, n, F] of prompt tokens from position `begin` on until the next draft."""
        self.unread.append((row, begin, hidden))

    def clear_hidden(self) -> None:
        self.unread = []

    def allocate(self, rows: int, columns: int) -> None:
        """Room for so many rows and columns, and for a block behind them."""
        own: Any = self.config.layers
        columns = self.executor.columns(columns + self.config.options.block_size + 1)
        shape = (own.num_hidden_layers, 2, rows, own.num_key_value_heads, columns, own.head_dim)
        if self.context.shape != shape:
            like = self.module.fc.weight
            self.context = torch.zeros(shape, dtype=like.dtype, device=like.device)  # what is not seen must be finite

    def read_prompts(self) -> None:
        """Makes the keys and values of the hidden states of prompts."""
        for row, begin, hidden in self.unread:
            made = self.module.context(hidden, torch.full((len(hidden),), begin, device=hidden.device))
            own = self.context if row is None else self.context[:, :, row : row + 1]
            own[..., begin : begin + hidden.shape[1], :] = made
        self.unread = []

    def take(self, hidden: Tensor, first: Tensor) -> None:
        """Makes the keys and values of hidden states [B, n, F] at positions from first [B] on."""
        self.read_prompts()  # of a row that ended without a draft: the next request's columns are not overwritten
        self.executor.compiled(self._take, self)(hidden, first)

    def _take(self, hidden: Tensor, first: Tensor) -> None:
        made = self.module.context(hidden, first)
        columns = first[:, None] + torch.arange(hidden.shape[1], device=first.device)
        columns = columns.clamp(max=self.context.shape[4] - 1)
        self.context.scatter_(4, columns[None, None, :, None, :, None].expand_as(made), made)

    def read(self, state: State) -> tuple[Tensor, Tensor]:
        """Logits [B, guesses, V'] of a block behind the committed tokens, made of the states [B, guesses, H]."""
        self.read_prompts()
        visible = self.executor.columns(max(state.lengths), self.context.shape[4])
        found: tuple[Tensor, Tensor] = self.executor.compiled(self._read, self)(state.rows, visible)
        return found

    def _read(self, rows: Rows, visible: int) -> tuple[Tensor, Tensor]:
        """`read` with the first `visible` columns of the context."""
        first, own = rows.length - 1, self.config.options
        block = torch.full((len(first), own.block_size), own.mask_token_id, device=first.device)
        block[:, 0] = rows.tokens.gather(1, first[:, None])[:, 0]
        states = self.module(self.module.embed_tokens(block), self.context[..., :visible, :], first)
        states = states[:, own.block_size - self.config.longest :]
        return self.module.lm_head(states), states


class DFlashDrafter(ParallelDrafter):
    """The guesses of a block are independent of each other given the text: q of a draft is the product of the q of its
    guesses, each the distribution that the guess was drawn from, so Algorithm 1 judges them as any chain. With
    DSpark's bias q of a guess depends on the guess before it, and is again what it was drawn from. A gamma policy may
    end a draft in front of a guess by DSpark's estimate, which does not depend on the guess, so texts keep p."""

    needs_hidden = True
    needs_prompt_hidden = True
    with_states = False
    stop: GammaPolicy | None = None

    class Settings(PartSettings, OwnSampling, BlockTreeSettings):
        must: ClassVar[str] = MODEL
        path: str = Field(description="a folder or hub id of a DFlash checkpoint")

    @classmethod
    def estimates(cls, settings: Any) -> bool:
        if cls.branches(settings):
            return False
        if not local_path(settings.path).is_dir():
            return True  # `begin` looks at what comes from the hub
        return CONFIDENCE in named_tensors(read_tensors(settings.path, "drafter.path"))

    @classmethod
    def refuse_target(cls, settings: Any, target: Any) -> None:
        if local_path(settings.path).is_dir():
            config = read_dflash(settings.path, "drafter.path")
            text = load_config(target, "target").get_text_config()
            refuse_other_target(config, f"drafter.path={settings.path}", target.path, text)

    def __init__(self, model: DFlashModel, sampling: Sampling, vocab_size: int):
        self.model, self.sampling, self.vocab_size = model, sampling, vocab_size
        self.longest, self.own_bytes = model.config.longest, model.weight_bytes
        self.context = int(model.config.layers.max_position_embeddings)
        rows = model.config.options.block_size / self.longest  # that the network reads per guess
        self.operations_per_token = rows * (model.weights + vocab_size * model.config.layers.hidden_size)

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "DFlashDrafter":
        key = "drafter.path"
        config = read_dflash(settings.path, key)
        network, targets = load_network(settings.path, key, config, target)
        target.feature_layers = config.layers_of(target.config.num_hidden_layers)
        V = target.vocab_size
        vocabulary = VocabMap(V, V) if targets is None else DraftVocabulary(targets.to(target.device), V, V)
        drafter = cls(DFlashModel(network, config, vocabulary, target), settings.own(context).sampling, V)
        drafter.draft_as(settings.block_shape(drafter.sampling, target.sampling.greedy, V))
        return drafter

    def begin(self, state: State, stop: GammaPolicy | None = None) -> None:
        self.stop = stop
        if stop is not None and self.model.module.confidence_head is None:
            raise ConfigError("gamma_policy=confidence_head is not possible: drafter.path has no confidence head")
        self.model.allocate(state.batch_size, state.tokens.shape[1])

    def logits(self, state: State, steps: int) -> Tensor:
        return self.model.vocabulary.fit(self.model.read(state)[0][:, :steps].float())

    def guesses(self, state: State, gamma: list[int]) -> Draft:
        if self.model.markov is None and self.stop is None:
            return super().guesses(state, gamma)
        (block, states), seen = self.model.read(state), self.seen(state)
        last = last_tokens(state.rows, 1)[0][:, 0]
        bits = window(state.noise[PROPOSAL], state.length, max(gamma))
        guesses: list[Tensor] = []
        qs: list[Tensor] = []
        for k in range(max(gamma)):
            if self.stop is not None and self.stop.signal is not None:
                signals = self.stop.signal(self.model.module.estimate(states[:, k], last), last)
                more = self.stop.go_on(state, [k] * len(gamma), signals.tolist())
                gamma = [g if on else min(g, k) for g, on in zip(gamma, more, strict=True)]
            if k == max(gamma):
                break
            own = self.place(block, k, last[:, None])
            if self.sampling.greedy:
                last = self.sampling.penalize(own, seen)[:, 0].argmax(-1)
            else:
                qs.append(self.sampling.probabilities(own, seen)[:, 0])
                last = draw(qs[-1], bits[:, k])
            guesses.append(last)
        if not guesses:
            return Draft.empty(state.batch_size, state.tokens.device)
        q = torch.stack(qs, 1) if qs else None
        return Draft.chain(torch.stack(guesses, 1), q, counts(tuple(gamma), block.device))

    def block(self, state: State, steps: int) -> Tensor:
        return self.model.read(state)[0]

    def place(self, block: Tensor, k: int, before: Tensor) -> Tensor:
        logits = super().place(block, k, before)
        if self.model.markov is not None:
            logits = logits + self.model.markov(before)
        return self.model.vocabulary.fit(logits.float())

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Hidden states of rejected guesses lie behind the text, where they are overwritten before they are seen."""
        self.model.take(scores.hidden_along(verdict), root)
