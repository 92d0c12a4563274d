"""What results.json, comparison.json and a line of prompts.jsonl hold: names, types and bounds, and nothing else is
believed of a file of others."""

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


def every(hint: Any) -> Any:
    """A list of these."""
    return GenericAlias(list, (hint,))


def named(hint: Any) -> Any:
    """A mapping of any names to these."""
    return GenericAlias(dict, (str, hint))


known: Any = Number | None  # null where a run has no such number
text: Any = str | None
interval: Any = Annotated[list[Number], Field(min_length=2, max_length=2)] | None
mean = shape({"mean": known, "stderr": known, "n": Count})  # above 1 for a few steps of a tree
efficiency = shape({"mean": known, "stderr": known})
ratio = {"measured": known, "ci95": interval}
factor = shape({"factor": str, "value": Number, "ci95": interval})
place = {"place": Annotated[int, Field(ge=1, le=LARGEST_GAMMA)], "mean": Number, "stderr": known, "n": Count}
steps = ("c", "v", "o", "target_step_seconds", "drafter_step_seconds", "verify_seconds")
ends = {"end_to_end": known, "end_to_end_ci95": interval, "theorem_3_8": known, "corrected": known}
counted = ("prompts", "rounds", "tokens", "drafted", "tested", "accepted", "recovered", "bonus", "failed")
percentiles = named(shape(dict.fromkeys(("p50", "p90", "p99"), known)))
provenance = {"git_sha": text, "dirty": bool | None, "versions": named(str), "device": str, "cpu": str}
provenance |= {"threads": Count, "argv": list[str], "started": str, "seconds": Number}
category = {"category": str, "prompts": Count, "tokens": Count, "alpha": mean, "block_efficiency": efficiency}
category |= {"speedup": shape(ratio), "speculative_tokens_per_second": known, "baseline_tokens_per_second": known}
RESULTS = shape(
    {
        "schema_version": int,
        "name": str,
        "status": Status,
        "config": shape({"gamma": Annotated[int, Field(ge=0, le=LARGEST_GAMMA)]}),
        "provenance": shape(provenance),
        "alpha": mean,
        "alpha_counted": mean,
        "alpha_on_target_text": mean,
        "draft_acceptance_rate": Share | None,
        "block_efficiency": efficiency,
        "cost": shape(dict.fromkeys(steps, known) | {"ci95": named(interval)}),
        "speedup": shape(ratio | ends | {"accounting": every(factor)}),
        "operations_factor": known,
        "optimal_gamma": Count | None,
        "acceptance": shape({"lengths": list[Count], "by_place": every(shape(place))}),
        "by_category": every(shape(category)),
        "lossless": shape({"expected": bool, "passed": bool | None, "reason": str, "detectable": list[str] | None}),
        "throughput": named(known),
        "speedup_over": named(shape(ratio)),
        "bandwidth": shape(dict.fromkeys(("target_bytes_per_second", "measured_peak_bytes_per_second"), known)),
        "memory": named(known),
        "latency": shape(dict.fromkeys(("first_token", "per_token"), percentiles)),
        "counts": shape(dict.fromkeys(counted, Count)),
        "notes": list[str],
        "details": shape({"facts": Facts, "choices": named(str), "overrides": list[str]}),
    }
)
row = {"rank": Count, "method": str, "requests": Count, "ratio": known, "ratio_ci95": interval, "p_value": known}
row |= dict.fromkeys(("tokens_per_second", "speedup", "alpha", "block_efficiency", "c", "v", "o"), known)
row |= {"speedup_ci95": interval}
rows: Any = Annotated[every(shape(row)), Field(min_length=1)]
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
        raise refused(error, content, place) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} cannot be read ({first_line(error)})") from error
    return found
