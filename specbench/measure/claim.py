"""Claims: published numbers of a target and a drafter, and whether they agree with a run here, or with each other.

A number is inconsistent if an honest one would differ as much in one case of a hundred at most: by Student's t of the
difference over its standard error, with the degrees of freedom of the smaller sample.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from specbench import theory
from specbench.errors import ConfigError, first_line, unknown
from specbench.measure.record import Number, Record, Some, refused
from specbench.measure.sums import finished, student

Answer = Literal["consistent", "inconsistent", "cannot tell"]
EXACT = 1e-6  # relative difference of what follows from tokens alone, with the same settings at temperature 0
SURE = 0.01  # probability of a difference between honest numbers below which they are inconsistent
COARSE = 0.2  # half of the difference's 95 % interval, over the number, above which agreement says nothing
MANY = 1000  # prompts of a claim that does not say how many it has
OF_TOKENS, OF_TIMES = ("alpha", "block_efficiency"), ("c", "v", "o")


class Part(BaseModel):
    """A part of a claim, without other keys."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise unknown(str(key), cls.model_fields, "key there")
        return given


class Figure(Part):
    """A number with what is known of its error. A text, as "0.80", is a number as it was printed, with its rounding."""

    value: Number
    stderr: Number | None = None
    ci95: tuple[Number, Number] | None = None
    prompts: Some = MANY  # that are independent
    rounding: Number = 0.0

    @model_validator(mode="before")
    @classmethod
    def _from_one_number(cls, given: Any) -> Any:
        parts = given if isinstance(given, dict) else {"value": str(given) if isinstance(given, bool) else given}
        with suppress(InvalidOperation):  # no number, which is refused below
            if isinstance(text := parts.get("value"), str) and isinstance(last := Decimal(text).as_tuple()[2], int):
                return {"rounding": f"5e{last - 1}"} | parts
        return parts

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest number that is printed like this one, within its error."""
        half = self.rounding + student(max(self.prompts - 1, 1), SURE) * (self.error or 0.0)
        return max(self.value - half, 0.0), self.value + half

    @property
    def error(self) -> float | None:
        """Its standard error, of which a printed number has its rounding alone; None if it is not known."""
        freedom = max(self.prompts - 1, 1)
        known = 0.0 if self.stderr is None and self.rounding else self.stderr
        return known if self.ci95 is None else (self.ci95[1] - self.ci95[0]) / 2 / student(freedom)


class Numbers(Part):
    """What is claimed; `texts` is a hash of all new tokens."""

    alpha: Figure | None = None
    block_efficiency: Figure | None = None
    texts: str | None = None
    c: Figure | None = None
    v: Figure | None = None
    o: Figure | None = None
    speedup: Figure | None = None
    theorem_3_8: Figure | None = None  # predicted by the claim


class Data(Part):
    """Hashes of the prompts, as data and as the models read them, and the chat template that made these."""

    sha256: str
    rendered_sha256: str
    template: str = ""


class Row(Part):
    """A row of a published table, with settings and numbers of its own."""

    of: str = ""
    choices: dict[str, Annotated[str, Field(pattern=r"^[\w.-]+$")]] = Field(default_factory=dict)  # options by group
    settings: dict[str, Any] = Field(default_factory=dict)
    numbers: Numbers = Field(default_factory=Numbers)


class Claim(Row):
    """What a file says. With `rows` it is several claims, which share the rest."""

    claim: Literal[1]  # version of this format
    source: str
    target: str
    drafter: str
    needs: str = ""  # what nobody can load: such a claim is compared with itself alone
    data: Data | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, str | int] = Field(default_factory=dict)
    rows: list[Row] = Field(default_factory=list)

    def each(self) -> "list[Claim]":
        """The claims of the rows."""
        both = [{"choices": self.choices | row.choices, "settings": self.settings | row.settings} for row in self.rows]
        own = [{"of": row.of, "numbers": row.numbers} for row in self.rows]
        found = [self.model_copy(update=each | more) for each, more in zip(own, both, strict=True)]
        return found or [self]


def read_claim(path: Path) -> Claim:
    """The claim in a YAML file. Raises ConfigError that names the key, the value and what is allowed."""
    try:
        found = yaml.safe_load(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it must be YAML with the keys {', '.join(Claim.model_fields)}")
        return Claim.model_validate(found)
    except ValidationError as error:
        raise refused(error, "the claim") from error
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"it cannot be read ({first_line(error)})") from error


@dataclass(frozen=True)
class Judged:
    """A claimed number, the same number here, the answer and why."""

    number: str
    claimed: str
    here: str
    answer: Answer
    why: str


def shown(number: Figure | str) -> str:
    """A number of a claim, or the beginning of a hash."""
    return number[:10] if isinstance(number, str) else f"{number.value:.6g}"


def numbers_of(results: Mapping[str, Any], records: Sequence[Record]) -> Numbers:
    """The numbers that a run can claim."""
    done, cost, speedup, details = finished(records), results["cost"], results["speedup"], results["details"]
    prompts, clusters = len({record.prompt_id for record in done}), details["clusters"]
    found = {name: {"value": cost[name], "ci95": cost["ci95"][name], "prompts": clusters} for name in OF_TIMES}
    found["speedup"] = {"value": speedup["measured"], "ci95": speedup["ci95"], "prompts": clusters}
    for name in OF_TOKENS:
        found[name] = {"value": results[name]["mean"], "stderr": results[name]["stderr"], "prompts": prompts}
    known: dict[str, Any] = {name: figure for name, figure in found.items() if figure["value"] is not None}
    if details["facts"]["greedy"]:
        texts = sorted((record.id, record.speculative.ids) for record in done if record.speculative)
        known["texts"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return Numbers.model_validate(known)


def compared(claimed: Figure, here: Figure, exact: bool = False) -> tuple[Answer, str]:
    """Whether two numbers differ by more than their errors explain or, if they should be `exact`, at all; and why."""
    errors = (0.0, 0.0) if exact else (claimed.error, here.error)
    if errors[0] is None:
        return "cannot tell", "the claim has no interval"
    if errors[1] is None:
        return "cannot tell", "no interval here: too few prompts, or tokens per round without an error"
    scale, freedom = claimed.value or 1.0, max(min(claimed.prompts, here.prompts) - 1, 1)
    difference, stderr = (here.value - claimed.value) / scale, math.hypot(errors[0], errors[1]) / scale
    rounding = (claimed.rounding + here.rounding) / scale
    half = student(freedom) * stderr + rounding
    why = f"difference {difference:+.1%} ± {half:.1%}"
    if abs(difference) > student(freedom, SURE) * stderr + max(EXACT, rounding):
        return "inconsistent", why
    return ("cannot tell", f"too wide an interval: {why}") if half > COARSE else ("consistent", why)


def judged(claim: Claim, results: Mapping[str, Any], records: Sequence[Record], same: bool) -> list[Judged]:
    """Each number of a claim beside that of a run here. `same`: the run has the claim's settings, all of them."""
    facts, here, found = results["details"]["facts"], numbers_of(results, records), list[Judged]()
    prompts = claim.data is not None and claim.data.rendered_sha256 == results["details"]["prompts"]["sha256"]
    equal = same and facts["greedy"] and facts["gamma"] is not None  # other policies may follow measured times
    equal = equal and claim.hardware.get("dtype") == facts["dtype"] == "float32"
    known = results["provenance"]
    machine = all(claim.hardware.get(key) == known[key] for key in ("device", "cpu", "threads"))
    exact = all(claim.versions.get(key) == known["versions"].get(key) for key in ("torch", "transformers"))
    exact = exact and equal and machine  # else arithmetic may differ
    for name, ours in here:
        theirs = vars(claim.numbers)[name]
        if theirs is None or ours is None:
            continue
        value = shown(ours)
        answer: Answer = "cannot tell"
        if name == "speedup" or name in OF_TIMES:
            timed = (value, *compared(theirs, ours))
            value, answer, why = of_speed(claim.numbers, theirs, here) if name == "speedup" else timed
            if not machine if name == "speedup" else answer == "inconsistent":
                answer, why = "cannot tell", f"it is of a machine and its load: {claim.hardware.get('device', '-')}"
        elif not prompts:
            why = "not shown to be of these prompts, as the models read them with chat template and thinking mode"
        elif name == "texts":
            answer = "consistent" if ours == theirs else "inconsistent" if exact else "cannot tell"
            why = "same settings" if exact else "maybe other settings, arithmetic or drafts"
        else:
            answer, why = compared(theirs, ours, exact=True)
            why = f"same settings at temperature 0: {why}"
            if not exact and not (equal and answer == "consistent"):
                answer, why = compared(theirs, ours)
        found.append(Judged(name, shown(theirs), value, answer, why))
    return found


def of_speed(claimed: Numbers, speedup: Figure, here: Numbers) -> tuple[str, Answer, str]:
    """The speedup of the claimed tokens per round at what a round costs here, gamma c + v + o; the answer and why."""
    own, ours, tokens = here.speedup, here.block_efficiency, claimed.block_efficiency
    if not (tokens and own and ours and tokens.value and own.value and speedup.value):
        return "-", "cannot tell", "it has no speed or no tokens per round"
    value, same = own.value * tokens.value / ours.value, math.isclose(tokens.value, ours.value, rel_tol=EXACT)
    parts = (own,) if same else (own, ours, tokens)  # the errors of the same tokens cancel
    errors = [each.error / each.value for each in parts if each.error is not None]
    stderr = value * math.hypot(*errors) if len(errors) == len(parts) else None
    rounding = value * tokens.rounding / tokens.value if stderr is not None else 0.0
    predicted = Figure(value=value, stderr=stderr, prompts=own.prompts, rounding=rounding)
    answer, why = compared(speedup, predicted)
    cost = f"a round costs {ours.value / own.value:.3g} plain steps here"
    return f"{value:.3g} predicted", answer, f"its {tokens.value:.3g} tokens per round, and {cost}: {why}"


def within(claimed: Numbers, gamma: Any) -> list[Judged]:
    """A claim without its weights: Theorem 3.8 for its alpha, gamma and c, and that a round costs a target's call."""
    alpha, c, tokens, speedup = claimed.alpha, claimed.c, claimed.block_efficiency, claimed.speedup
    said: dict[str, tuple[Answer, str]] = {}
    if alpha and c and isinstance(gamma, int):
        worst = theory.walltime_improvement(min(alpha.ends[0], 1.0), gamma, c.ends[1])
        best = theory.walltime_improvement(min(alpha.ends[1], 1.0), gamma, c.ends[0])
        most = theory.walltime_improvement(1.0, gamma, c.ends[0])
        why = f"Theorem 3.8: {worst:.2f} to {best:.2f}, and {most:.2f} at alpha = 1"
        for name, figure in (("speedup", speedup), ("theorem_3_8", claimed.theorem_3_8)):
            if figure:
                fits = figure.ends[0] <= best and worst <= figure.ends[1]
                impossible = name == "theorem_3_8" or figure.ends[0] > most
                said[name] = "consistent" if fits else "inconsistent" if impossible else "cannot tell", why
    elif speedup and tokens and speedup.value:
        why = f"a round costs {tokens.value / speedup.value:.2f} target steps by it, of which the target's call is 1"
        said["speedup"] = "inconsistent" if speedup.ends[0] > tokens.ends[1] else "cannot tell", why
    return [Judged(name, shown(own), "-", *said.get(name, ("cannot tell", "-"))) for name, own in claimed if own]
