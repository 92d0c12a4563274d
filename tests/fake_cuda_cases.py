"""Whole decodes on a CUDA device that is simulated, and the table of what may wait for it."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import decoder_cases
import torch
from cuda_on_cpu import Device, to_cuda
from decoder_cases import CACHES, TREES, DigitTokenizer, first_layer_of_pairs, make_drafter, spare_of
from graph_memory import Rerun
from law_cases import learning_policy
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from specbench.contrib.dflash.config import DFlashConfig, Options
from specbench.contrib.dflash.drafter import DFlashDrafter
from specbench.contrib.dflash.model import DFlashModel
from specbench.contrib.dflash.network import DFlashNetwork, Markov
from specbench.contrib.eagle.drafter import EagleDrafter, ParallelEagleDrafter
from specbench.contrib.eagle.model import EagleModel, ParallelEagleModel
from specbench.decoding.sampling import Sampling
from specbench.decoding.search import Decoding
from specbench.decoding.sequence import Sequence
from specbench.decoding.timer import Timer
from specbench.executors.auto import AutoExecutor
from specbench.executors.eager import EagerExecutor
from specbench.models.float_logits import with_float_logits
from specbench.models.heads import Heads, HeadsConfig, LookAhead, LookAheadConfig
from specbench.models.language_model import LanguageModel
from specbench.models.vocabulary import VocabMap
from specbench.policies.adaptive import AdaptiveGamma
from specbench.policies.confidence import ConfidenceGamma
from specbench.policies.entropy import EntropyGamma
from specbench.policies.fixed import FixedGamma
from specbench.policies.heuristic import HeuristicGamma
from specbench.policies.lenience import LoadLenience
from specbench.run import decoder as session
from specbench.run.decoder import Session
from specbench.stats.metrics.calibration import Calibration
from specbench.verifiers.block import BlockVerifier
from specbench.verifiers.iterative import IterativeVerifier
from specbench.verifiers.match import GreedyTreeVerifier, MatchVerifier
from specbench.verifiers.rejection import RejectionVerifier
from specbench.verifiers.speculative import SpeculativeVerifier
from specbench.verifiers.synthetic import SyntheticVerifier
from specbench.verifiers.traversal import TraversalVerifier
from specbench.verifiers.typical import TypicalVerifier

GAMMA, COLUMNS, V = 3, 60, 32


LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


CONFIG = LlamaConfig(**LAYER, num_hidden_layers=2, vocab_size=V, max_position_embeddings=256, eos_token_id=None)


VERIFIERS = {
    "speculative": SpeculativeVerifier,
    "iterative": IterativeVerifier,
    "match": MatchVerifier,
    "block": BlockVerifier,
    "rejection": RejectionVerifier,
    "typical": lambda sampling: TypicalVerifier(sampling.greedy, epsilon=0.3, delta=0.1),
    "traversal": TraversalVerifier,
    "synthetic": lambda sampling: SyntheticVerifier(sampling.greedy, alpha=0.7),
    "greedy_tree": GreedyTreeVerifier,
}


POLICIES = {
    "fixed": lambda: FixedGamma(GAMMA),
    "adaptive": lambda: learning_policy(AdaptiveGamma, largest=GAMMA, prior=2.0, forget=0.1, probe=64),
    "heuristic": lambda: HeuristicGamma(gamma=2, largest=GAMMA),
    "entropy": lambda: learning_policy(EntropyGamma, largest=GAMMA, signal="entropy"),
    "confidence": lambda: ConfidenceGamma(largest=GAMMA, threshold=0.05),
}


@dataclass(frozen=True)
class Case:
    """What is decoded together."""

    drafter: str | None = "model"  # None: plain decoding
    verifier: str = "speculative"
    cache: str = "static"
    executor: str = "eager"
    policy: str = "fixed"
    temperature: float = 1.0
    penalty: float = 1.0
    rows: int = 3
    stop: bool = False
    load: bool = False  # lenience follows the queue, and requests arrive over time
    triton: bool = False  # the kernels of our own, in Triton's slow interpreter

    def __str__(self) -> str:
        default = Case()
        return "-".join(str(v) for k, v in vars(self).items() if v != getattr(default, k)) or "usual"

    @property
    def kind(self) -> str:
        """The drafter that draws guesses on the host, if one does below others."""
        return (self.drafter or "").removeprefix("under_").removeprefix("under_")


class Allowed(NamedTuple):
    """A place where the host waits for the device."""

    times: str  # how often
    most: Callable[[Case], int] | None  # waits of a round; None: after the last round
    why: str


def rounds_inside(case: Case) -> int:
    """The most rounds of drafters that are decoded speculatively themselves, in a round of `case`; each adds a token
    at least, and their gamma is 2."""
    levels = (case.drafter or "").count("under_")
    return GAMMA * levels + 2 * (levels - 1) * GAMMA if levels else 0


WAITS = {
    "decoding.state.State.read_round": Allowed(
        "one a round", lambda case: 1 + rounds_inside(case), "lengths, ends and tokens of the rows, in one copy"
    ),
    "decoding.state.State.find_stop_strings": Allowed(
        "one more a round with `stop_strings`", lambda case: int(case.stop), "strings are searched before the commit"
    ),
    "drafters.model.ModelDrafter._chain_until": Allowed(
        "one a guess with `gamma_policy=confidence` and `entropy`",
        lambda case: GAMMA if case.policy in ("entropy", "confidence") else 0,
        "the policy decides after each guess",
    ),
    "drafters.lookup_base.CountDrafter.propose_after": Allowed(
        "one more a round with `drafter=unigram`, `bigram` and a sampling `ngram`",
        lambda case: int(case.kind in ("unigram", "bigram", "ngram_sample")) * max(1, rounds_inside(case)),
        "their guesses are drawn on the host, with the state's noise",
    ),
    "decoding.token_tree.pack": Allowed(
        "one more a round where guesses may be equal (`tree`, `multi_draft`); none with fixed shapes",
        lambda case: int(case.drafter in (*TREES, "own_trees") and case.executor != "cudagraph"),
        "the widest row's number of different guesses",
    ),
    "drafters.multi_draft.MultiDrafter.settle": Allowed(
        "one more a round for each of several models of `drafter=multi_draft`",
        lambda case: 2 * int(case.drafter == "multi_draft_two"),
        "which guesses each model's cache holds",
    ),
    "decoding.timer.Timer._wait": Allowed(
        "once a round, after prompts are read, and at the end, outside of all laps",
        None,
        "no lap hides behind what came before it",
    ),
    "run.recorder.Recorder._rows": Allowed("after the last round", None, "numbers of each round are read"),
}


def eagle_of_layers(kind, target, place, helper) -> EagleDrafter:
    """Reads what stands before the first layer and behind the last one."""
    module, size = first_layer_of_pairs(target.module), CONFIG.hidden_size
    features = nn.Linear(2 * size, size, bias=False).to(torch.bfloat16)
    features.weight.data.copy_(torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(4)) / size**0.5)
    module.features = place(features)
    model = EagleModel(module, target, kind, target.sampling, 4, (0, 2), normed=True, targets=None)
    return EagleDrafter(model, V, 4)


def parallel_eagle_of_layers(kind, target, place, helper) -> ParallelEagleDrafter:
    """As `eagle_of_layers`; the logits of all guesses come from masks."""
    module, size = first_layer_of_pairs(target.module), CONFIG.hidden_size
    generator = torch.Generator().manual_seed(4)
    features = nn.Linear(2 * size, size, bias=False).to(torch.bfloat16)
    features.weight.data.copy_(torch.randn(size, 2 * size, generator=generator) / size**0.5)
    module.features, module.mask_token = place(features), 5
    hidden = nn.Parameter(torch.randn(1, 1, 2 * size, generator=generator).to(torch.bfloat16), requires_grad=False)
    module.mask_hidden = place(nn.ParameterList([hidden]))[0]
    model = ParallelEagleModel(module, target, kind, target.sampling, 4, (0, 2), normed=True, targets=None)
    return ParallelEagleDrafter(model, V, 4)


def dflash_of_layers(kind, target, place, helper) -> DFlashDrafter:
    """A block of four rows, the first of which guesses too, with DSpark's bias."""
    layers = Qwen3Config(**LAYER, head_dim=16, num_hidden_layers=1, vocab_size=V, max_position_embeddings=256)
    options = Options(block_size=4, mask_token_id=5, sample_from_anchor=True, markov_rank=2)
    config = DFlashConfig(layers, options, (0, 2), causal_windows=False)
    network, markov = DFlashNetwork(config, 2 * CONFIG.hidden_size), Markov(V, 2, V)
    generator = torch.Generator().manual_seed(3)
    network.markov_head = markov
    new = {name: torch.randn(w.shape, generator=generator) * 0.3 for name, w in network.named_parameters()}
    network.load_state_dict({name: w.to(torch.bfloat16) for name, w in new.items()}, strict=False, assign=True)
    place(network.eval().requires_grad_(False))
    network.embed_tokens = target.module.get_input_embeddings()
    network.lm_head = target.module.get_output_embeddings()
    target.feature_layers = (0, 2)
    model = DFlashModel(network, config, VocabMap(V, V), target)
    return DFlashDrafter(model, target.sampling, V)


PUBLISHED = {
    "eagle_layers": eagle_of_layers,
    "parallel_eagle": parallel_eagle_of_layers,
    "dflash": dflash_of_layers,
}  # read hidden states of several layers


class Replay(Rerun):
    """Runs the captured function again in place of a graph; it must not wait."""

    def __init__(self, device: Device | None):
        super().__init__()
        self.device = device

    def give_up(self, captured, error):
        raise error

    def capture(self, function):
        again = super().capture(function)

        def replay():
            before = [*self.device.waits] if self.device else []
            again()
            assert not self.device or self.device.waits == before, "a graph waits"

        return replay


EXECUTORS = {"eager": lambda device: EagerExecutor(), "auto": lambda device: AutoExecutor(), "cudagraph": Replay}


def weights(make, config, seed):
    """make(config) in bfloat16 with large random weights, so that its laws differ from uniform."""
    generator = torch.Generator().manual_seed(seed)
    module = make(config).eval().to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


class Decoder:
    """Decodes a case on a device: "cuda", or the CPU if `device` is None."""

    def __init__(self, case: Case, device: Device | None, number_text: str):
        self.case, self.device = case, device
        self.place = to_cuda if device else lambda module: module
        self.executor = EXECUTORS["eager" if case.executor == "auto" and not device else case.executor](device)
        greedy = case.temperature == 0
        self.sampling = Sampling(temperature=case.temperature, repetition_penalty=case.penalty)
        target, helper = self.model(2, 1), self.model(1, 2)
        target.load_again = lambda: self.place(weights(LlamaForCausalLM, CONFIG, 1))
        with mock.patch.object(decoder_cases, "extras", self.extras):
            make = PUBLISHED.get(case.drafter or "", make_drafter)
            drafter = make(
                case.drafter or "random", target, self.place if make is not make_drafter else number_text, helper
            )
        make = VERIFIERS[case.verifier]
        takes = make if not isinstance(make, type) or make is SpeculativeVerifier else lambda s: make(greedy)
        verifier = takes(self.sampling)
        if case.load:
            verifier = LoadLenience([1.0, 0.5], 1).verifier(
                lambda lenience: SpeculativeVerifier(self.sampling, lenience)
            )
        self.session = Session(SimpleNamespace(
            target=target, drafter=drafter, policy=POLICIES[case.policy](), verifier=verifier,
            metrics={"calibration": Calibration(4)}, batch_size=case.rows, prefill_chunk=8, verdict_tokens=100,
            spare=spare_of(case.drafter or "", GAMMA), stop_strings=["7 "] if case.stop else [],
            decoding=Decoding(),
        ))  # fmt: skip

    def model(self, layers: int, seed: int) -> LanguageModel:
        config = copy.copy(CONFIG)
        config.num_hidden_layers = layers
        module = self.place(weights(LlamaForCausalLM, config, seed))
        module = module if self.device else with_float_logits(module)  # as on CUDA
        return LanguageModel(module, DigitTokenizer(), name="tiny", sampling=self.sampling,
                             new_cache=CACHES[self.case.cache], executor=self.executor,
                             attention="triton" if self.case.triton else "sdpa")  # fmt: skip

    def extras(self, kind, name, model):
        falling = [[0.5 / (k + i + 1) for i in range(4)] for k in range(3)]
        config = {
            Heads: HeadsConfig(hidden_size=32, heads=3, accuracy=falling),
            LookAhead: LookAheadConfig(hidden_size=32, count=2),
        }[kind]
        return self.place(weights(kind, config, 3))

    def __call__(self, seed: int = 0, plain: bool = False) -> list[list[int]]:
        """The new tokens of four requests, or of two in one row."""
        generator = torch.Generator().manual_seed(5)
        prompts = [torch.randint(V, (n,), generator=generator).tolist() for n in (3, 9, 1, 6)]
        count = 4 if self.case.rows > 1 else 2
        wanted = [Sequence(p, len(p) + n, 100 * seed + n) for p, n in zip(prompts, (5, 4, 2, 3), strict=True)][:count]
        arrivals = [0.0] * count if self.case.load else None
        speculative = self.case.drafter is not None and not plain
        decoded = self.session.decode(wanted, speculative, COLUMNS, arrivals, evidence=True)
        return [request.tokens for request in decoded.requests]


def violations(case: Case, device: Device, decode: Callable[[], list[list[int]]]) -> tuple[list[str], list[list[int]]]:
    """Decodes; returns what waits against `WAITS`, in sentences, and the tokens."""
    starts: list[int] = []

    class Rounds(Timer):
        def _wait(self):
            """Waits outside of all laps are no part of decoding: tests/decoding/test_clock.py looks at them."""

        def start(self):
            super().start()
            starts.append(len(device.waits))

    device.waits.clear()
    with mock.patch.object(session, "Timer", Rounds):
        tokens = decode()
    found = [f"{w} before the first round" for w in device.waits[: starts[0]]]
    for begin, end in pairwise(starts):
        for where, times in Counter(wait.place for wait in device.waits[begin:end]).items():
            allowed = WAITS[where].most if where in WAITS else None
            most = allowed(case) if allowed else 0
            if times > most:
                found.append(f"{where} waits {times} times in a round, allowed are {most}")
    if (times := sum(wait.place.endswith("Recorder._rows") for wait in device.waits)) > 2:
        found.append(f"the recorder waits {times} times in a decode: once for rounds and once for evidence are allowed")
    for wait in device.waits[starts[-1] :]:
        if wait.place not in WAITS or WAITS[wait.place].most is not None:
            found.append(f"{wait} after the last round")
    return found, tokens
