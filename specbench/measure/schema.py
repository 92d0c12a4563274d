"""What results.json, comparison.json and lines of prompts.jsonl hold: nothing else is believed of others' files."""

import json
import math
from collections.abc import Mapping
from types import GenericAlias
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model

from specbench.errors import ConfigError, first_line, shown
from specbench.measure.record import SCHEMA_VERSION, Count, Facts, Number, Share, Status, refused
from specbench.settings import LARGEST_GAMMA


def shape(fields: Mapping[str, Any]) -> type[BaseModel]:
    """A mapping with these fields, and maybe with others."""
    every: dict[str, Any] = {name: (hint, ...) for name, hint in fields.items()}
    return create_model("Shape", **every)


def of(container: type[Any], *hints: Any) -> Any:
    """A list of these, or a mapping of any names to these."""
    return GenericAlias(container, hints)


known: Any = Number | None  # null where a run has no such number
text: Any = str | None
interval: Any = Annotated[list[Number], Field(min_length=2, max_length=2)] | None
gamma: Any = Annotated[int, Field(ge=0, le=LARGEST_GAMMA)]
mean = shape({"mean": known, "stderr": known, "n": Count})  # above 1 for a few steps of a tree
efficiency = shape({"mean": known, "stderr": known})
ratio = {"measured": known, "ci95": interval}
provenance = {"git_sha": text, "dirty": bool | None, "versions": of(dict, str, str), "device": str, "cpu": str}
provenance |= {"threads": Count, "argv": list[str], "started": str, "seconds": Number}
steps = ("c", "v", "o", "target_step_seconds", "drafter_step_seconds", "verify_seconds")
cost = shape(dict.fromkeys(steps, known) | {"ci95": of(dict, str, interval)})
ends = {"end_to_end": known, "end_to_end_ci95": interval, "theorem_3_8": known, "corrected": known}
factor = shape({"factor": str, "value": Number, "ci95": interval})
speedup = shape(ratio | ends | {"accounting": of(list, factor)})
place = {"place": Annotated[int, Field(ge=1, le=LARGEST_GAMMA)], "mean": Number, "stderr": known, "n": Count}
acceptance = shape({"lengths": list[Count], "by_place": of(list, shape(place))})
category = {"category": str, "prompts": Count, "tokens": Count, "alpha": mean, "block_efficiency": efficiency}
category |= {"speedup": shape(ratio), "speculative_tokens_per_second": known, "baseline_tokens_per_second": known}
lossless = shape({"expected": bool, "passed": bool | None, "reason": str, "detectable": list[str] | None})
bandwidth = shape(dict.fromkeys(("target_bytes_per_second", "measured_peak_bytes_per_second"), known))
percentiles = of(dict, str, shape(dict.fromkeys(("p50", "p90", "p99"), known)))
latency = shape(dict.fromkeys(("first_token", "per_token"), percentiles))
counted = ("prompts", "rounds", "tokens", "drafted", "tested", "accepted", "recovered", "bonus", "failed")
counts = shape(dict.fromkeys(counted, Count))
details = shape({"facts": Facts, "choices": of(dict, str, str), "overrides": list[str]})
FIELDS: dict[str, tuple[Any, str]] = {  # of results.json: what it may be, and what it means
    "schema_version": (int, "version of these names"),
    "name": (str, "name of the run"),
    "status": (Status, "complete, or interrupted: then the numbers are those of the prompts that were finished"),
    "config": (shape({"gamma": gamma}), "the whole configuration"),
    "provenance": (shape(provenance), "git_sha, dirty, versions, device, cpu, threads, argv, started, seconds"),
    "alpha": (mean, "mean of beta = sum min(p, q) over tested positions (Definition 3.1): {mean, stderr, n}"),
    "alpha_counted": (mean, "accepted / tested guesses: {mean, stderr, n}"),
    "alpha_on_target_text": (mean, "mean of beta along plain decoding's text (Corollary 3.6): {mean, stderr, n}"),
    "draft_acceptance_rate": (Share | None, "accepted / drafted guesses, which is not alpha"),
    "block_efficiency": (efficiency, "tokens per target call, recovered or bonus token included: {mean, stderr}"),
    "cost": (cost, "c, v, o in target steps; target_step_seconds, drafter_step_seconds, verify_seconds; ci95"),
    "speedup": (
        speedup,
        "seconds per token of plain decoding over speculative decoding's: measured, end_to_end (with prefill), the "
        "prediction of Theorem 3.8, the corrected prediction block_efficiency / (gamma c + v + o), and accounting: "
        "factors whose product is measured",
    ),
    "operations_factor": (known, "by which arithmetic operations grow (Theorem 3.11); null for trees"),
    "optimal_gamma": (Count | None, "maximises Theorem 3.8 at the measured alpha and c; 0: do not speculate"),
    "acceptance": (acceptance, "lengths: rounds that accepted 0, 1, .. guesses; by_place: mean of beta at each place"),
    "by_category": (of(list, shape(category)), "alpha, block_efficiency, speedup, ... of each category of prompts"),
    "lossless": (
        lossless,
        "whether the output distribution is the target's: expected, passed (null: not shown), reason, and the "
        "smallest faults that nine of ten such runs would find (detectable)",
    ),
    "throughput": (of(dict, str, known), "new tokens per second of decoding, all rows together, of each method"),
    "speedup_over": (of(dict, str, shape(ratio)), "seconds per token of each peer over ours: {measured, ci95}"),
    "bandwidth": (bandwidth, "bytes per second that a plain step reads, and that the memory was measured to read"),
    "memory": (of(dict, str, known), "peak_bytes, weights_bytes, kv_bytes"),
    "latency": (latency, "seconds to the first token and per later token, p50, p90 and p99, of both methods"),
    "counts": (counts, "prompts (requests), rounds, tokens, drafted, tested, accepted, recovered, bonus, failed"),
    "notes": (list[str], "sentences that a reader of the numbers must know"),
    "details": (details, "what the numbers were made from and by: facts, prompts, choices, overrides, ..."),
}
RESULTS = shape({name: hint for name, (hint, _) in FIELDS.items()})
row = {"rank": Count, "method": str, "requests": Count, "ratio": known, "ratio_ci95": interval, "p_value": known}
row |= dict.fromkeys(("tokens_per_second", "speedup", "alpha", "block_efficiency", "c", "v", "o"), known)
row |= {"speedup_ci95": interval}
rows: Any = Annotated[of(list, shape(row)), Field(min_length=1)]
COMPARISON = shape({"schema_version": int, "kind": Literal["comparison"], "rows": rows})


def finite(figures: str) -> float:
    """A number of JSON, which has no NaN. Raises ValueError if it is beyond what a float holds."""
    if not math.isfinite(number := float(figures)):
        raise ValueError(f"{figures} is no finite number")
    return number


def parsed(content: bytes, hint: type[BaseModel], place: str) -> Any:
    """JSON that has the shape of `hint`, in plain Python. `place` says where it stands. Raises ConfigError."""
    try:
        found = json.loads(content, parse_float=finite, parse_constant=finite)
        version = found.get("schema_version") if isinstance(found, dict) else None
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{place} was not written by this version of specbench: its schema_version is {shown(version)}, not "
                f"{SCHEMA_VERSION}"
            )
        hint.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise refused(error, place) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} cannot be read ({first_line(error)})") from error
    return found
