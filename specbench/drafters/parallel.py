"""Drafters that guess all tokens of a draft in one call (section 3.6), as a chain or as a tree."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL
from specbench.decoding.rows import Rows, last_tokens, seen_tokens, window
from specbench.decoding.sampling import Sampling, draw
from specbench.decoding.state import State
from specbench.decoding.transfers import counts
from specbench.drafters.base import Drafter, OwnSampling
from specbench.drafters.tree_shapes import BlockTreeSettings, DynamicTree, Nodes
from specbench.models.heads import LookAhead, PartSettings, load_part
from specbench.models.language_model import BorrowedCache, LanguageModel
from specbench.models.load import Context


class ParallelDrafter(Drafter):
    """Base class: draws a chain, or a tree of a `shape`, from the logits that a subclass computes in one call."""

    with_encoders = False  # nothing trains their parts for encoder-decoders
    reads_text = False  # q at a position depends on where its round began
    sampling: Sampling
    vocab_size: int  # the target's
    longest: int
    shape: DynamicTree | None = None

    @classmethod
    def branches(cls, settings: Any) -> bool:
        return cls.trees or settings.nodes is not None

    @classmethod
    def point_masses(cls, settings: Any) -> bool:
        return cls.branches(settings) and settings.children == "best"

    @classmethod
    def nodes(cls, settings: Any, gamma: int) -> int:
        return gamma if settings.nodes is None else int(settings.nodes)

    @classmethod
    def candidates(cls, settings: Any, context: Context) -> int:
        own = settings.own(context).sampling, context.sampling.greedy
        shape = settings.block_shape(*own) if isinstance(settings, BlockTreeSettings) else None
        return sum(shape.levels(context.gamma)) if shape else cls.nodes(settings, context.gamma)

    def draft_as(self, shape: DynamicTree | None) -> None:
        """Sets the shape of drafts, None for chains."""
        self.shape, self.trees = shape, shape is not None
        self.only_likeliest = shape is not None and shape.point_masses

    @property
    def fewest(self) -> int:
        """The fewest guesses that `logits` is asked for."""
        return 0

    @abstractmethod
    def logits(self, state: State, steps: int) -> Tensor:
        """Logits [B, steps, V] of the guesses x_1 .. x_steps."""

    def can_guess(self, state: State) -> list[bool]:
        """Which rows have the inputs that a draft needs; the others draft nothing in this round."""
        return [True] * state.batch_size

    def propose(self, state: State, gamma: list[int]) -> Draft:
        gamma = [min(g, self.longest) if able else 0 for g, able in zip(gamma, self.can_guess(state), strict=True)]
        if not max(gamma):
            return Draft.empty(state.batch_size, state.tokens.device)
        return self.guesses(state, gamma) if self.shape is None else self.tree(state, gamma, self.shape)

    def guesses(self, state: State, gamma: list[int]) -> Draft:
        """The draft of gamma[b] guesses for row b, one of which is not 0."""
        # Near the end of a text the usual number too, so that few shapes are compiled.
        logits, seen = self.logits(state, max(*gamma, self.fewest))[:, : max(gamma)], self.seen(state)
        count = counts(tuple(gamma), logits.device)
        if self.sampling.greedy:
            return Draft.chain(self.sampling.penalize(logits, seen).argmax(-1), None, count)
        q = self.sampling.probabilities(logits, seen)
        return Draft.chain(draw(q, window(state.noise[PROPOSAL], state.length, q.shape[1])), q, count)

    def tree(self, state: State, gamma: list[int], shape: DynamicTree) -> Draft:
        """The draft of at most gamma[b] levels of guesses for row b, one of which is not 0."""
        depth = min(self.steps(gamma), self.longest)
        block, seen = self.block(state, max(depth, self.fewest)), self.seen(state)
        places = iter(range(depth))

        def step(nodes: Nodes | None, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
            before = last_tokens(state.rows, 1)[0] if nodes is None else nodes.tokens
            return shape.children(self.sampling, self.place(block, next(places), before), bits, seen)

        return shape.draft(shape.grow(step, state.rows, depth), gamma, depth)[0]

    def block(self, state: State, steps: int) -> Tensor:
        """What `place` makes logits of."""
        return self.logits(state, steps)

    def place(self, block: Tensor, k: int, before: Tensor) -> Tensor:
        """Logits [B, m, V] of the guess at place k behind each of the tokens before [B, m]."""
        return block[:, k, None].expand(-1, before.shape[1], -1)

    def seen(self, state: State) -> Tensor | None:
        """[B, 1, V] bool: the tokens that the repetition penalty applies to, without the round's guesses."""
        if self.sampling.repetition_penalty == 1:
            return None
        return seen_tokens(state.tokens, state.length, self.vocab_size)[:, None]


class PassDrafter(ParallelDrafter):
    """PaSS (Monea et al. 2023): the target guesses its own next tokens in one more pass per round, on its own cache,
    over its last token and trained look-ahead embeddings (`specbench.train method=pass`). x_1 is drawn from p."""

    with_states = False

    class Settings(PartSettings, OwnSampling, BlockTreeSettings):
        part: ClassVar[str] = "lookahead"
        lookahead: str = Field(description="a folder of look-ahead embeddings")

    def __init__(self, model: BorrowedCache, lookahead: LookAhead, vocab_size: int, gamma: int):
        """`vocab_size` is the target's V; `gamma` is the usual gamma."""
        self.model, self.lookahead, self.sampling = model, lookahead, model.sampling
        self.vocab_size, self.context = vocab_size, model.context
        self.longest = lookahead.config.count + 1
        self.operations_per_token, self.gamma = model.operations_per_token, gamma

    @property
    def fewest(self) -> int:  # an executor may have fixed shapes after its warm-up only
        return min(self.gamma, self.longest) if self.model.executor.fixed_shapes else 0

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "PassDrafter":
        name = f"{target.name} with look-ahead tokens"
        model = BorrowedCache(target.module, target, name, settings.own(context).sampling)
        lookahead = load_part(LookAhead, settings.lookahead, "drafter.lookahead", model)
        drafter = cls(model, lookahead, model.vocab_size, context.gamma)
        drafter.draft_as(settings.block_shape(drafter.sampling, target.sampling.greedy, drafter.vocab_size))
        return drafter

    def logits(self, state: State, steps: int) -> Tensor:
        self.model.borrow()
        visible = self.model.rollback_to([length - 1 for length in state.lengths], steps, state.active)
        # Behind the text the cache will hold embeddings, which a row beside a short one may not overwrite at once.
        self.model.cached = [min(c, n) for c, n in zip(self.model.cached, state.lengths, strict=True)]
        ahead = self.lookahead.embeddings[: steps - 1]
        logits: Tensor = self.model.executor.compiled(self._logits, self.model)(state.rows, ahead, visible)
        return logits

    def _logits(self, rows: Rows, ahead: Tensor, visible: int) -> Tensor:
        """Logits [B, 1 + K, V] after the last committed token and each of the embeddings [K, H]."""
        tokens, first = last_tokens(rows, 1)
        embed: Any = self.model.module.get_input_embeddings()
        text = embed(self.model.vocabulary.read(tokens))
        x = torch.cat([text, ahead.expand(len(text), -1, -1).to(text.dtype)], 1)
        return self.model.forward(x, first, visible).float()
