"""Multi-token prediction: a module that comes with the checkpoint drafts (DeepSeek-V3, 2412.19437, section 2.2)."""

from typing import Any, ClassVar

from torch import Tensor

from specbench.component import Selections
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.model import Scores
from specbench.decoding.rows import Rows
from specbench.decoding.state import State
from specbench.decoding.token_tree import Tree
from specbench.decoding.transfers import upload
from specbench.drafters.model import DraftMemory
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.drafters.tree import TreeDrafter
from specbench.drafters.tree_shapes import Shape, TreeSettings
from specbench.models.checkpoint import MODEL
from specbench.models.context import Context
from specbench.models.heads import PartSettings
from specbench.models.language_model import LanguageModel
from specbench.models.mtp import MtpModel
from specbench.models.mtp_weights import load_mtp, missing_in, numbers_of


class MtpDrafter(TreeDrafter):
    """The first guess of a round follows from the target's hidden states, the others from the module's own: it is
    applied again for each guess, in a tree to the states of the guess's parent. What it stored for guesses is
    overwritten by pairs with the target's states."""

    needs_hidden = True
    listens = True
    reads_text = False  # q depends on where the round began
    with_encoders = False
    with_states = False  # a recurrent target reads its prompt in pieces that are not listened to
    trees = False
    ends_early = True

    class Settings(PartSettings, OwnSampling, TreeSettings):
        part: ClassVar[str] = "path"
        must: ClassVar[str] = MODEL
        path: str | None

        def own_bytes(self, target: Any, size: Any, itemsize: int) -> tuple[int, int, int]:
            weights, hidden = numbers_of(self.path or target.path) or (0, 0)
            return weights * itemsize, weights and size.column // size.layers, hidden * itemsize

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        target = run["target"].settings
        if settings.path is None and target.weights == "random":
            return "with target.weights=random, which has no such module: choose target.weights=pretrained"
        return missing_in(settings.path or target.path, "drafter.path" if settings.path else "target.path")

    def __init__(self, model: MtpModel, vocab_size: int, gamma: int, shape: Shape | None = None):
        super().__init__(model, vocab_size, gamma, shape)
        self.pairs = model
        self.was_active: list[bool] = []  # by row, when the last draft was made

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "MtpDrafter":
        key = "target.path" if settings.path is None else "drafter.path"
        path = settings.path or target.name
        module = load_mtp(path, key, target)
        model = MtpModel(module, target, f"{path}'s MTP module", settings.own(context).sampling, context.gamma)
        return cls(model, target.vocab_size, context.gamma, settings.tree_shape(model, target.sampling.greedy))

    def propose(self, state: State, gamma: list[int]) -> Draft:
        self.was_active = list(state.active)
        if None in self.pairs.of_prompts:
            self.pairs.prefill(state)
        return super().propose(state, [g if n > 1 else 0 for g, n in zip(gamma, state.lengths, strict=True)])

    def draft_nothing(self, state: State) -> None:
        """Reads the pending pairs all the same, so that they do not pile up."""
        given, visible = self.prepare(state, 0)
        x, first, (pending, _) = self.first_read(self.pairs.rows_of(state), *given)
        self.pairs.executor.leaf(self.pairs.read_pending, self.pairs)(x, pending, first - 1, visible)

    def prepare(self, state: State, steps: int) -> tuple[tuple[Any, ...], int]:
        own = self.pairs
        rows = zip(own.cached, state.lengths, state.active, strict=True)
        most = max((length - 1 - cached for cached, length, on in rows if on), default=1)
        n = own.width if own.executor.fixed_shapes else max(1, most)  # pairs that are read, of each row
        visible, B = own.make_room_for(state, steps), len(own.rows_of(state).length)
        return (own.pending[:B, :n], own.behind[:B].clamp(max=n - 1)), visible

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        hidden = scores.hidden_along(verdict)
        self.pairs.take(hidden, verdict.accepted, upload(self.was_active, hidden.device))

    def first_read(self, rows: Rows, *given: Any) -> tuple[Tensor, Tensor, DraftMemory]:
        """As that of the base class, for pairs: the memory is hidden states, first pending [B, n, H], and up to which
        pair behind [B] of each row they reach, later the module's own [B, m, H], and None."""
        pending, behind = given
        return *self.pairs.first_pairs(rows, behind, pending.shape[1]), (pending, behind)

    def read(
        self, x: Tensor, first: Tensor, memory: DraftMemory, visible: int, tree: Tree | None = None
    ) -> tuple[Tensor, DraftMemory]:
        hidden, behind = memory
        assert hidden is not None
        logits, after = self.pairs.predict(x, hidden, first - 1, behind, visible, tree)  # where the hidden state stands
        return logits, (after, None)
