"""An EAGLE draft model: pairs of the target's hidden states and of tokens, as multi-token prediction reads them.

b rows, N pairs, A layers of the target whose states are read, H the target's hidden size, V vocabulary, V' of the draft
model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from specbench.decoding.sampling import Sampling
from specbench.models.hidden_states import hidden_states
from specbench.models.language_model import LanguageModel
from specbench.models.mtp import MtpModel
from specbench.models.vocabulary import DraftVocabulary


class EagleModel(MtpModel):
    """`module` has a `pair_input` and `features`, which make of the target's hidden states what it reads in their
    place behind the text: its own, before its last norm, or with `normed` behind it."""

    def __init__(
        self, module: PreTrainedModel, target: LanguageModel, name: str, sampling: Sampling, gamma: int,
        layers: Sequence[int], normed: bool, targets: Tensor | None,
    ):  # fmt: skip
        """`layers` are those of the target that it reads, none for its last hidden states; targets [V'] the tokens that
        it predicts, None for all."""
        super().__init__(module, target, name, sampling, gamma)
        self.features: Any = self.module.features
        self.gamma = gamma
        self.own_states = () if normed else (self.config.num_hidden_layers,)
        embedding: Any = target.module.get_input_embeddings()
        self.target_size = int(embedding.weight.shape[1])
        if targets is not None:
            self.vocabulary = DraftVocabulary(targets.to(self.device), self.own_vocab_size, target.vocab_size)
        self.listen(target, layers)

    def listen(self, target: LanguageModel, layers: Sequence[int]) -> None:
        """Reads the hidden states in front of these layers from now on."""
        self.layers = target.feature_layers = tuple(layers)

    @property
    def feature_size(self) -> int:
        return self.target_size * max(1, len(self.layers))

    def project(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.features(hidden)
        return found

    @torch.inference_mode()
    def agreement(self, target: LanguageModel, texts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """At how many positions of texts the likeliest first guess is the target's likeliest token, and of how many."""
        equal = positions = 0
        for text in texts:
            tokens = torch.tensor([text], device=self.device)
            with hidden_states(target.module, self.layers) as found:
                p = target.module(input_ids=tokens, use_cache=False).logits
            self.allocate(1, len(text))
            visible = self.rollback_to([0], len(text) - 1)
            pairs = self.join(tokens[:, 1:], self.project(found[0][:, :-1]))
            q = self.forward(pairs, torch.zeros(1, dtype=torch.long, device=self.device), visible)
            equal += int((q.argmax(-1) == p[:, 1:].argmax(-1)).sum())
            positions += len(text) - 1
        self.free()
        return equal, positions


class ParallelEagleModel(EagleModel):
    """P-EAGLE: behind the pairs of the text stand masks, pairs of `mask_token` and `mask_hidden` [1, 1, A * H] of the
    module, whose logits are those of the guesses after the first one. They are overwritten as guesses are."""

    def allocate(self, rows: int, columns: int) -> None:
        super().allocate(rows, columns + 2 * self.gamma)

    def block(self, tokens: Tensor, hidden: Tensor, first: Tensor, behind: Tensor, visible: int) -> Tensor:
        """Logits [b, gamma, V] of all guesses: behind pair behind [b] of the pairs of tokens [b, N] and the target's
        hidden states [b, N, A * H], the first of them at position first [b], and behind gamma - 1 masks after it."""
        module: Any = self.module
        masked = torch.arange(tokens.shape[1] + self.gamma - 1, device=first.device) > behind[:, None]
        tokens = F.pad(tokens, (0, self.gamma - 1)).masked_fill(masked, module.mask_token)
        hidden = torch.where(masked[..., None], module.mask_hidden, F.pad(hidden, (0, 0, 0, self.gamma - 1)))
        places = behind[:, None] + torch.arange(self.gamma, device=first.device)

        def chosen(values: Tensor) -> Tensor:
            return values[torch.arange(len(values), device=first.device)[:, None], places]

        with hidden_states(self.module, (), chosen):
            logits = self.forward(self.join(tokens, self.project(hidden)), first, visible)
        return logits if logits.shape[1] == self.gamma else chosen(logits)
