"""The parts of a run: everything that was chosen and built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.data.prompts import Prompt, Request
from specbench.decoding.search import Decoding
from specbench.drafters.base import Drafter
from specbench.models.language_model import LanguageModel
from specbench.peers.base import Peer
from specbench.policies.base import GammaPolicy
from specbench.policies.workload import Workload
from specbench.verifiers.base import Verifier

EVERY_GAMMA = 20  # as large as any policy of conf/ has it
FEWEST, MOST = 4, 16  # requests per row in a group: rows idle at the end of each, and a failure loses all of it
WARM_UP_TOKENS = 16
SHORT = 3  # tokens of a job whose limit cuts its first draft
CALIBRATION_TOKENS = 32  # per gamma, before the first prompt, for policies that choose by cost


@dataclass(frozen=True)
class Components:
    """The built components and the scalars of a run. `config` and `choices` are what results.json records of them."""

    name: str
    config: dict[str, Any]
    choices: dict[str, str]  # the option that was chosen in each group
    target: LanguageModel
    drafter: Drafter
    policy: GammaPolicy
    verifier: Verifier
    decoding: Decoding
    prompts: Sequence[Prompt]
    peers: Mapping[str, Peer]
    workload: Workload
    max_new_tokens: int
    batch_size: int  # rows
    spare: int  # cache columns that a round's guesses may take beyond a row's limit
    prefill_chunk: int  # tokens
    seed: int
    segments_before: int = 0  # of its workload, which other runs have decoded
    verdict_tokens: int = 0  # tokens that the losslessness verdict may read again
    stop_strings: Sequence[str] = ()
    rendered: Mapping[Prompt, Request] = field(default_factory=dict)  # of prompts of one turn that were read as texts
    acceptance_rule: str = ""  # `Verifier.acceptance_rule`
    notes: Sequence[str] = ()  # warnings to print with the results

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt that the models can read, with one at least to follow; of encoder-decoders, the
        longest input of their encoders."""
        if self.target.start_tokens is None:
            return self.target.context - 1
        return min(m.input_context for m in (self.target, *self.drafter.models) if m.start_tokens is not None)

    @property
    def gammas(self) -> list[int]:
        """The constant gammas whose rounds are timed for policies that choose by cost: all up to `EVERY_GAMMA`, then
        each half as large again, up to the policy's largest. With fixed shapes, those that the policy uses."""
        return timed_gammas(self.policy, self.target.executor.fixed_shapes)


def timed_gammas(policy: GammaPolicy, fixed_shapes: bool) -> list[int]:
    """The gammas of `Components.gammas`. Costs between two of them are interpolated."""
    if fixed_shapes:
        return [*policy.widths]
    gammas = [*range(1, min(policy.largest, EVERY_GAMMA) + 1)] or [0]
    while gammas[-1] < policy.largest:
        gammas.append(min(gammas[-1] * 3 // 2, policy.largest))
    return gammas


def segment_size(rows: int, workload: Workload) -> int:
    """The number of requests that a segment of a workload over time has at least."""
    return max(FEWEST * rows, workload.segment)


def new_tokens(gamma: int) -> tuple[int, ...]:
    """Tokens of the jobs of a warm-up with this gamma."""
    return max(WARM_UP_TOKENS, gamma + SHORT), SHORT, gamma, 1
