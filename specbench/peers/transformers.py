"""Peers from transformers, in the same process: `generate`, assisted generation, and prompt lookup.

Each decodes one prompt at a time, since assisted generation refuses batches. The models are stock: loaded again if our
executor changed its own. Assisted generation keeps gamma constant, as in the paper, and has no confidence threshold,
which is .4 by default.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from specbench.decoding.sequence import Sequence
from specbench.models.context import Context
from specbench.models.encoder_decoder import encoder_words
from specbench.models.generation import NOT_APPLIED
from specbench.models.language_model import LanguageModel
from specbench.peers.base import Peer, PeerOutput, Peers

log = logging.getLogger(__name__)


class TransformersPeers(Peers):
    """Peers `generate`, on CUDA `generate_static` (static cache and compiled forwards), `assisted` (for a drafter that
    is a model) and `prompt_lookup`."""

    loads_models = True

    def __init__(self, peers: Mapping[str, "Generate"]):
        self.peers = peers

    @classmethod
    def from_settings(
        cls, settings: Any, context: Context, target: LanguageModel, drafter: LanguageModel | None, gamma: int
    ) -> "TransformersPeers":
        sampling, module = context.sampling, target.stock_module()
        options: dict[str, Any] = {
            "eos_token_id": target.stop_tokens or None,
            "pad_token_id": (target.stop_tokens or [0])[0],
            "repetition_penalty": sampling.repetition_penalty,
            "do_sample": not sampling.greedy,
        }
        if target.start_tokens is not None:
            options |= {key: plain[0] for key, plain in NOT_APPLIED.items()}
        if not sampling.greedy:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        found: dict[str, dict[str, Any]] = {"generate": {}}
        if target.device.type == "cuda" and target.start_tokens is None:
            found["generate_static"] = {"cache_implementation": "static"}  # which transformers compiles by itself
        if gamma > 0:
            found |= speculative(target, drafter, gamma)
        return cls({name: Generate(module, target.device, options | more) for name, more in found.items()})

    def by_name(self) -> Mapping[str, "Generate"]:
        return self.peers


def speculative(target: LanguageModel, drafter: LanguageModel | None, gamma: int) -> dict[str, dict[str, Any]]:
    """The options of transformers' speculative decoders that these models can take; a log line says why others not."""
    if target.recurrence or (drafter is not None and drafter.recurrence):
        log.warning("left out: assisted generation of transformers refuses models with a recurrent state")
        return {}
    lookup: dict[str, dict[str, Any]] = {"prompt_lookup": {"prompt_lookup_num_tokens": gamma}}
    if drafter is None:
        return lookup
    if drafter.shared_tokens is not None or drafter.own_vocab_size != target.vocab_size:
        log.warning("left out: assisted generation of transformers needs one tokenizer and logits of the same size")
        return lookup
    return {"assisted": {"assistant_model": assistant(drafter.stock_module(), gamma)}} | lookup


def assistant(module: Any, gamma: int) -> Any:
    """Sets a model to assist with a constant gamma and no confidence threshold; returns it."""
    module.generation_config.num_assistant_tokens = gamma
    module.generation_config.num_assistant_tokens_schedule = "constant"
    module.generation_config.assistant_confidence_threshold = 0
    return module


class Generate(Peer):
    """Decodes by `module.generate` with some options."""

    def __init__(self, module: Any, device: torch.device, options: dict[str, Any]):
        self.module, self.device, self.options = module, device, options

    def decode(self, sequence: Sequence) -> PeerOutput:
        start = torch.tensor([list(sequence.tokens)], device=self.device)
        read, more = start, {}
        if sequence.encoder_input is not None:
            (read,), more = encoder_words(self.module, sequence.encoder_input).values(), {"decoder_input_ids": start}
        more["attention_mask"] = torch.ones_like(read)
        first = FirstStep(self.device)
        torch.manual_seed(sequence.key)
        text = self.module.generate(
            read,
            max_new_tokens=sequence.limit - len(sequence.tokens),
            stopping_criteria=StoppingCriteriaList([first]),
            **more,
            **self.options,
        )
        seconds = first.now() - first.seconds
        return PeerOutput(text[0, len(sequence.tokens) :].tolist(), text.shape[1] - first.length, seconds)


class FirstStep(StoppingCriteria):
    """Stops nothing; notes when the first step, which reads the prompt, has ended."""

    def __init__(self, device: torch.device):
        self.device, self.length, self.seconds = device, 0, 0.0

    def now(self) -> float:
        """Seconds of a clock, read when all work of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Notes the time after the first step. input_ids [B, T]; returns [B], all False."""
        if not self.length:
            self.length, self.seconds = input_ids.shape[1], self.now()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
