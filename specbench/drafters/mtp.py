"""Multi-token prediction: a module that comes with the checkpoint drafts (DeepSeek-V3, 2412.19437, section 2.2)."""

from typing import Any, ClassVar

from torch import Tensor

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.state import State
from specbench.decoding.token_tree import Tree
from specbench.decoding.transfers import upload
from specbench.drafters.base import OwnSampling
from specbench.drafters.model import Inputs, Memory
from specbench.drafters.mtp_checkpoint import load_mtp, missing_in
from specbench.drafters.pair_model import PairModel
from specbench.drafters.tree import TreeDrafter
from specbench.drafters.tree_shapes import Shape, TreeSettings
from specbench.errors import ConfigError
from specbench.models.checkpoint import MODEL
from specbench.models.heads import PartSettings
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context


class PairDrafter(TreeDrafter):
    """Drafts with a `PairModel`. The first guess of a round follows from the target's hidden states, the others from
    the model's own: it is applied again for each guess, in a tree to the states of the guess's parent. What it stored
    for guesses is overwritten by pairs with the target's states.

    The memory of a step is hidden states and where they end. In the first step they are those of the pending pairs
    [b, n, H], and behind[b] is the number of the last pair of each row; later they are the model's own [b, m, H], and
    None."""

    needs_hidden = True
    needs_prompt_hidden = True
    reads_text = False  # q depends on where the round began
    with_encoders = False
    with_states = False  # a recurrent target reads its prompt in pieces whose hidden states are not passed on
    trees = False
    ends_early = True

    def __init__(self, model: PairModel, vocab_size: int, gamma: int, shape: Shape | None = None):
        super().__init__(model, vocab_size, gamma, shape)
        self.pairs = model

    def propose(self, state: State, gamma: list[int]) -> Draft:
        if None in self.pairs.unread:
            self.pairs.prefill(state)
        return super().propose(state, [g if n > 1 else 0 for g, n in zip(gamma, state.lengths, strict=True)])

    def skip_round(self, state: State) -> None:
        """Reads the pending pairs all the same, so that they do not pile up."""
        self.pairs.executor.compiled(self.read, self.pairs)(*self.prepare(state, 0))

    def prepare(self, state: State, steps: int) -> Inputs:
        own, rows = self.pairs, self.pairs.rows_of(state)
        missing = zip(own.cached, state.lengths, state.active, strict=True)
        most = max((length - 1 - cached for cached, length, on in missing if on), default=1)
        n = own.width if own.executor.fixed_shapes else max(1, most)  # pairs that are read, of each row
        visible, B = own.make_room_for(state, steps), len(rows.length)
        pending, behind = own.pending[:B, :n], own.behind[:B].clamp(max=n - 1)
        tokens, first = own.first_pairs(rows, behind, n)
        return Inputs(tokens, first, (pending, behind), visible)

    def read(
        self, x: Tensor, first: Tensor, memory: Memory, visible: int, tree: Tree | None = None
    ) -> tuple[Tensor, Memory]:
        hidden, behind = memory
        assert hidden is not None
        logits, after = self.pairs.predict(x, hidden, first - 1, behind, visible, tree)  # where the hidden state stands
        return logits, (after, None)

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        hidden = scores.hidden_along(verdict)
        self.pairs.take(hidden, verdict.accepted, upload(state.active, hidden.device))


class MtpDrafter(PairDrafter):
    """The module of the target's own checkpoint, or of another one."""

    class Settings(PartSettings, OwnSampling, TreeSettings):
        must: ClassVar[str] = MODEL
        path: str | None

    @classmethod
    def refuse_target(cls, settings: Any, target: Any) -> None:
        if settings.path is None and target.weights == "random":
            raise ConfigError("target.weights=random has no such module: choose target.weights=pretrained")
        key = "target.path" if settings.path is None else "drafter.path"
        if reason := missing_in(settings.path or target.path, key):
            raise ConfigError(f"drafter=mtp is not possible {reason}")

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "MtpDrafter":
        key = "target.path" if settings.path is None else "drafter.path"
        path = settings.path or target.name
        module = load_mtp(path, key, target)
        model = PairModel(module, target, f"{path}'s MTP module", settings.own(context).sampling, context.gamma)
        return cls(model, target.vocab_size, context.gamma, settings.tree_shape(model, target.sampling.greedy))
