"""What a checkpoint's generation_config asks for: tokens that are never drawn, and settings that are not applied.

V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Settings of generate() that change the distribution of a token by the text before it, and the values that do not.
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "min_length": (0, None), "min_new_tokens": (None, 0), "no_repeat_ngram_size": (0, None),
    "encoder_no_repeat_ngram_size": (0, None), "encoder_repetition_penalty": (1.0, None),
    "forced_eos_token_id": (None,), "exponential_decay_length_penalty": (None,), "sequence_bias": (None,),
    "num_beams": (1, None),
}  # fmt: skip


@dataclass(frozen=True)
class Suppressed:
    """Tokens [n] that generate() never draws, and those that it does not draw as the first one, at position `begin`."""

    always: Tensor
    first: Tensor
    begin: int

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Logits or log p [..., N, V], of what follows the tokens at positions [..., N], without these tokens."""
        if len(self.always):
            logits = logits.index_fill(-1, self.always, -torch.inf)
        if not len(self.first):
            return logits
        begins = (positions == self.begin - 1)[..., None]
        return torch.where(begins, logits.index_fill(-1, self.first, -torch.inf), logits)


def suppressed_by(module: Any, begin: int | None) -> Suppressed:
    """What generate() suppresses in a text whose first token is at position `begin`; with None that is another one in
    each text, where what is suppressed there is not applied."""
    options = generation_config(module)
    never = options and never_drawn(options)
    first = options and begin is not None and options.begin_suppress_tokens
    return Suppressed(_known(never or [], module), _known(first or [], module), begin or 0)


def never_drawn(options: Any) -> list[int]:
    """The tokens that a generation_config forbids everywhere."""
    return [*(options.suppress_tokens or []), *(words[0] for words in options.bad_words_ids or [] if len(words) == 1)]


def _known(tokens: Sequence[int], module: Any) -> Tensor:
    """Those of the tokens that the model has, [n]: generate() passes over others."""
    size = module.config.get_text_config().vocab_size
    kept = sorted({token for token in tokens if 0 <= token < size})
    return torch.tensor(kept, dtype=torch.long, device=next(module.parameters()).device)


def not_applied(module: Any, repetition_penalty: float) -> list[str]:
    """Settings of generation_config that ask for another distribution than a run with this penalty has, as
    "min_length=56"."""
    options = generation_config(module)
    if options is None:
        return []
    asked = vars(options)
    found = [f"{key}={asked[key]}" for key, plain in NOT_APPLIED.items() if key in asked and asked[key] not in plain]
    if options.repetition_penalty not in (None, repetition_penalty):
        found.append(f"repetition_penalty={options.repetition_penalty}")
    if longer := [words for words in options.bad_words_ids or [] if len(words) > 1]:
        found.append(f"bad_words_ids={longer}")
    if options.begin_suppress_tokens and not module.config.is_encoder_decoder:
        found.append(f"begin_suppress_tokens={options.begin_suppress_tokens}")
    return found


def generation_config(module: Any) -> Any:
    """The generation_config of a module; None if transformers cannot generate with it."""
    return vars(module).get("generation_config")
