"""What a checkpoint's generation_config asks for: tokens that are never drawn, and settings that are not applied."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specbench.errors import shown
from specbench.models.sizes import stops_of

# Settings of generate() that the run decides itself, or applies as they are: no note is due.
DECIDED = {
    *("temperature", "top_k", "top_p", "do_sample", "repetition_penalty", "max_length", "max_new_tokens"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("suppress_tokens", "bad_words_ids"),  # `forbidden_tokens`, and what `not_applied` says of them
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "is_assistant"),
    "transformers_version",
}
# Values of the others that ask for nothing, where 0 and false are not among them or not the only ones.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True), "forced_eos_token_id": (None,), "min_p": (None, 0), "guidance_scale": (None, 1),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "top_h"), (None, 1)),
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty"), (None, 1)),
    "assistant_confidence_threshold": (None, 0, 0.4),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), (None, 10)),
}  # fmt: skip


def forbidden_tokens(module: Any) -> Tensor:
    """Those of the model's tokens that generate() never draws, [n]."""
    size = module.config.get_text_config().vocab_size
    found = sorted({token for token in never_drawn(module) if 0 <= token < size})  # generate() passes over others
    return torch.tensor(found, dtype=torch.long, device=next(module.parameters()).device)


def never_drawn(module: Any) -> list[int]:
    """The tokens that a generation_config forbids everywhere. generate() lets bad words end a text all the same."""
    # It is None if transformers cannot generate with the module.
    options = vars(module).get("generation_config") or GenerationConfig()
    alone = [words[0] for words in options.bad_words_ids or [] if len(words) == 1]
    return [*(options.suppress_tokens or []), *(token for token in alone if token not in stops_of(options))]


def not_applied(module: Any, repetition_penalty: float) -> list[str]:
    """Settings of generation_config that ask for what a run with this penalty does not do, as "min_length=56"."""
    options = vars(module).get("generation_config") or GenerationConfig()
    settings = {key: vars(options).get(key) for key in vars(GenerationConfig()) if key[0] != "_" and key not in DECIDED}
    asked = {key: value for key, value in settings.items() if value not in NEUTRAL.get(key, (None, False, 0, [], {}))}
    found = [f"{key}={shown(value)}" for key, value in asked.items()]
    if options.repetition_penalty not in (None, repetition_penalty):
        found.append(f"repetition_penalty={options.repetition_penalty}")
    if longer := [words for words in options.bad_words_ids or [] if len(words) > 1]:
        found.append(f"bad_words_ids={shown(longer)}")
    return found
