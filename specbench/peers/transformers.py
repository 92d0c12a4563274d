"""Peers from transformers, in the same process: `generate`, assisted generation, and prompt lookup.

Each decodes one prompt at a time, since assisted generation refuses batches, under the run's settings and nothing of
the checkpoint's generation_config. The models are stock: loaded again if our executor changed its own.
"""

import logging
import time
from collections import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.stops import StopStrings
from specbench.errors import causes
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context
from specbench.peers import Peers

log = logging.getLogger(__name__)
STATIC = {"cache_implementation": "static"}  # with which transformers compiles forwards on CUDA
STATIC_ASSISTED = (5, 24)  # before, assisted generation refuses static caches


class TransformersPeers(Peers):
    """Peers `generate`, on CUDA `generate_static` (static cache and compiled forwards), `assisted` (for a drafter that
    is a model) and `prompt_lookup`; from transformers 5.24 on the target's calls of these are compiled too on CUDA."""

    @classmethod
    def from_settings(
        cls, settings: Any, context: Context, target: LanguageModel, drafter: LanguageModel | None, gamma: int
    ) -> Mapping[str, "Generate"]:
        settings = settings_of(context.sampling, target)
        strings = StopStrings(context.stop_strings, target.tokenizer) if context.stop_strings else None
        found: dict[str, dict[str, Any]] = {"generate": {}}
        cuda = target.device.type == "cuda" and target.start_tokens is None
        if cuda:
            found["generate_static"] = STATIC
        if gamma > 0:
            new = tuple(map(int, transformers.__version__.split(".")[:2])) >= STATIC_ASSISTED
            static = STATIC if cuda and new else {}
            found |= {name: own | static for name, own in assistants(target, drafter, gamma).items()}
        return {name: Generate(target, settings | own, strings) for name, own in found.items()}


def settings_of(sampling: Sampling, target: LanguageModel) -> dict[str, Any]:
    """The whole GenerationConfig of a peer: the run's own settings and the target's special tokens. Nothing else of
    what the checkpoint asks for is in it; `models/generation.py` names that in a note."""
    found: dict[str, Any] = {
        "do_sample": not sampling.greedy,
        "use_cache": True,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": target.stop_tokens or None,
        "pad_token_id": (target.stop_tokens or [0])[0],
        "suppress_tokens": target.forbidden.tolist() or None,
    }
    if not sampling.greedy:
        found |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    if target.start_tokens is not None:
        found["decoder_start_token_id"] = target.start_tokens[0]
    return found


def assistants(target: LanguageModel, drafter: LanguageModel | None, gamma: int) -> dict[str, dict[str, Any]]:
    """Transformers' own speculative decoders that these models can take, as arguments of generate() by name, with a
    constant gamma and no confidence threshold; a log line says why others not."""
    if target.recurrence or (drafter is not None and drafter.recurrence):
        log.warning("left out: assisted generation of transformers refuses models with a recurrent state")
        return {}
    lookup = {"prompt_lookup": {"prompt_lookup_num_tokens": gamma}}
    if drafter is None:
        return lookup
    if drafter.vocabulary.shared is not None or drafter.own_vocab_size != target.vocab_size:
        log.warning("left out: assisted generation of transformers needs one tokenizer and logits of the same size")
        return lookup
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0}
    return {"assisted": {"assistant_model": drafter.stock, "num_assistant_tokens": gamma} | constant} | lookup


class PeerOutput(NamedTuple):
    """One prompt, decoded by a peer."""

    tokens: list[int]  # all new tokens
    decoded: int  # tokens after the first step, which reads the prompt
    decode_seconds: float  # without the first step


class Generate:
    """Decodes by the target's `generate` with some settings, alone or with an assistant's module."""

    columns = 0  # tokens of the longest text of the run, from warm-up on: a cache of one size is compiled for once

    def __init__(self, target: LanguageModel, settings: dict[str, Any], strings: StopStrings | None):
        self.module: Any = target.stock
        self.device, self.settings, self.strings = target.device, settings, strings
        self.assistant = settings.pop("assistant_model", None)

    def decode_all(self, sequences: abc.Sequence[Sequence]) -> list[dict[str, Any]]:
        """What records keep of a batch, whose prompts are decoded one after another: of each the output, or why there
        is none. An error of transformers, whatever it is, is the peer's alone."""
        found: list[dict[str, Any]] = []
        for sequence in sequences:
            try:
                output = self.decode(sequence)
                found.append({"tokens": output.decoded, "seconds": output.decode_seconds, "ids": output.tokens})
            except Exception as error:
                found.append({"error": causes(error)})
        return found

    def decode(self, sequence: Sequence) -> PeerOutput:
        """Decodes one prompt; may raise any exception."""
        begin = len(sequence.tokens)
        start = torch.tensor([list(sequence.tokens)], device=self.device)
        read, more = start, dict[str, Any]()
        if sequence.encoder_input is not None:
            read = torch.tensor([list(sequence.encoder_input)], device=self.device)
            more["decoder_input_ids"] = start
        if self.assistant is not None:
            more["assistant_model"] = self.assistant
        fixed = {"max_cache_len": max(self.columns, sequence.limit)} if STATIC.items() <= self.settings.items() else {}
        config = GenerationConfig(**self.settings, **fixed, max_new_tokens=sequence.limit - begin)
        watch = Watch(self.device, begin, self.strings)
        torch.manual_seed(sequence.key)
        with only(config, self.module, self.assistant), watch.steps_of(None if fixed else self.module):
            text = self.module.generate(
                read,
                generation_config=config,
                attention_mask=torch.ones_like(read),
                stopping_criteria=StoppingCriteriaList([watch]),
                **more,
            )
        seconds, tokens = watch.now() - watch.seconds, text[0, begin:].tolist()[: watch.end]
        return PeerOutput(tokens, max(0, len(tokens) - watch.first), seconds)


@contextmanager
def only(config: GenerationConfig, *modules: Any) -> Iterator[None]:
    """Inside this context the modules have this generation_config, from which generate() takes what is left open."""
    before = [(module, module.generation_config) for module in modules if module is not None]
    try:
        for module, _ in before:
            module.generation_config = config
        yield
    finally:
        for module, own in before:
            module.generation_config = own


class Watch(StoppingCriteria):
    """Notes when the first step, which reads the prompt, has ended; stops a text at the first of the run's stop
    strings, by the rule of the run. An assistant's guesses may have gone on behind it: `end` says what is kept."""

    def __init__(self, device: torch.device, begin: int, strings: StopStrings | None):
        self.device, self.begin, self.strings = device, begin, strings
        self.first, self.seconds, self.known = 0, 0.0, 0
        self.end: int | None = None  # new tokens
        self.stepped = self.always = True  # whether the next call counts; whether each does

    @contextmanager
    def steps_of(self, module: Any) -> Iterator[None]:
        """Inside this context only calls behind a forward of the module count, if one is given: some versions of
        transformers also ask whether an assistant's guesses would end the text, in front of the forward."""
        if module is None:  # whose forward may be compiled; those versions compile none with guesses
            yield
            return
        forward = module.register_forward_pre_hook(lambda *given: setattr(self, "stepped", True))
        self.stepped = self.always = False
        try:
            yield
        finally:
            forward.remove()

    def now(self) -> float:
        """Seconds of a clock, read when all work of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """input_ids [1, T]; returns [1], whether the text has ended."""
        if not self.stepped:
            return torch.tensor([False], device=input_ids.device)
        self.stepped = self.always
        if not self.first:
            self.first, self.seconds = input_ids.shape[1] - self.begin, self.now()
        if self.strings is not None:
            new = input_ids[0, self.begin :].tolist()
            kept = self.strings.find(new[: self.known], new[self.known :])
            self.end = None if kept is None else self.known + kept
            self.known = len(new)
        return torch.tensor([self.end is not None], device=input_ids.device)
