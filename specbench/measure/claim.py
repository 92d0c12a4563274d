"""Claims: published numbers of a target and a drafter, and whether they agree with a run here, or with each other.

A number is inconsistent if an honest one would differ as much once in a hundred times: by the difference over its
standard error, Student's t with Welch's degrees of freedom (Welch 1947), of logarithms where it is a ratio of times.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specbench import theory
from specbench.errors import ConfigError, first_line, unknown
from specbench.measure.intervals import student, student_tail
from specbench.measure.record import Number, Record, Some, refused
from specbench.measure.rounds import finished

Answer = Literal["consistent", "inconsistent", "cannot tell"]
CANNOT_TELL: Answer = "cannot tell"
EXACT = 1e-6  # difference of what follows from tokens alone, with the same checkpoints at temperature 0 in float32
SURE = 0.01  # probability of a difference between honest numbers below which they are inconsistent
COARSE = 0.2  # half of the difference's 95 % interval, over the number, above which agreement says nothing
MANY = 1000  # prompts of a claim that does not say how many it has
OF_TOKENS, OF_TIMES = ("alpha", "block_efficiency"), ("c", "v", "o")


class Part(BaseModel):
    """A part of a claim, without other keys."""

    model_config = ConfigDict(extra="forbid")


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
        if isinstance(given, str):
            return {"value": given, "rounding": 0.5 * 10.0 ** -len(given.partition(".")[2])}
        return given if isinstance(given, dict | bool) else {"value": given}

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest number that is printed like this one."""
        return max(self.value - self.rounding, 0.0), self.value + self.rounding

    @property
    def freedom(self) -> int:
        """Degrees of freedom of its standard error."""
        return max(self.prompts - 1, 1)

    def error(self, log: bool) -> float | None:
        """Its standard error, with `log` that of its logarithm; None if it is not known."""
        if self.ci95 is None or self.ci95[0] <= 0:
            return self.stderr / self.value if log and self.stderr is not None and self.value else self.stderr
        low, high = map(math.log, self.ci95) if log else self.ci95
        return (high - low) / 2 / student(self.freedom)


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
    """Hashes of the prompts, as data and as the models read them."""

    sha256: str
    rendered_sha256: str
    template: str = ""


class Row(Part):
    """A row of a published table, with settings and numbers of its own."""

    of: str = ""
    choices: dict[str, str] = Field(default_factory=dict)  # options by group of the configuration
    settings: dict[str, Any] = Field(default_factory=dict)
    numbers: Numbers = Field(default_factory=Numbers)


class Claim(Row):
    """What a file says. With `rows` it is several claims, which share the rest."""

    claim: Literal[1]  # version of this format
    source: str
    target: str
    drafter: str
    needs: str = ""  # what nobody can load: such a claim is compared with itself alone
    weights: dict[str, str] = Field(default_factory=dict)  # hashes by the setting that names the checkpoint
    data: Data | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, str | int] = Field(default_factory=dict)
    rows: list[Row] = Field(default_factory=list)

    def each(self) -> "list[Claim]":
        """The claims of the rows."""
        return [self.model_copy(update=self.joined(row)) for row in self.rows] or [self]

    def joined(self, row: Row) -> dict[str, Any]:
        """What a row changes."""
        both = {"choices": self.choices | row.choices, "settings": self.settings | row.settings}
        return {"of": row.of, "numbers": row.numbers, **both}


def read_claim(path: Path) -> Claim:
    """The claim in a YAML file. Raises ConfigError that names the file, the key, the value and what is allowed."""
    try:
        found = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}): it must be a claim in YAML") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no claim: it must be YAML with the keys {', '.join(Claim.model_fields)}")
    try:
        return Claim.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] != "extra_forbidden":
            raise refused(error, str(path)) from error
        *places, key = ("", *(part for part in first["loc"] if isinstance(part, str)))
        shapes: dict[str, type[Part]] = {"": Claim, "numbers": Numbers, "data": Data, "rows": Row}
        fields = shapes.get(places[-1], Figure).model_fields
        raise ConfigError(f"{path}: {unknown(key, fields, 'key there')}") from error


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
    done, cost, speedup = finished(records), results["cost"], results["speedup"]
    clusters = len({record.prompt_id for record in done}), results["details"]["clusters"]
    found: dict[str, Any] = {}
    for name in OF_TOKENS:
        found[name] = {"value": results[name]["mean"], "stderr": results[name]["stderr"], "prompts": clusters[0]}
    for name, value, ci95 in (
        *((name, cost[name], cost["ci95"][name]) for name in OF_TIMES),
        ("speedup", speedup["measured"], speedup["ci95"]),
    ):
        found[name] = {"value": value, "ci95": ci95, "prompts": clusters[1]}
    known = {name: figure for name, figure in found.items() if figure["value"] is not None}
    if results["details"]["facts"]["greedy"]:
        texts = sorted((record.id, record.speculative.ids) for record in done if record.speculative)
        known["texts"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    return Numbers.model_validate(known)


def compared(claimed: Figure, here: Figure, log: bool) -> tuple[Answer, str]:
    """Whether two means, or with `log` two ratios, differ by more than their errors explain, and why."""
    ours, theirs = here.error(log), claimed.error(log)
    if theirs is None:
        return "cannot tell", "the claim has no interval"
    if ours is None:
        return "cannot tell", "too few prompts here for an interval"
    if log and not here.value * claimed.value:
        return "cannot tell", "0 has no ratio"
    scale = 1.0 if log else claimed.value or 1.0
    difference = math.log(here.value / claimed.value) if log else here.value - claimed.value
    stderr = max(math.hypot(ours, theirs), EXACT * scale)
    freedom = stderr**4 / max(theirs**4 / claimed.freedom + ours**4 / here.freedom, stderr**4 / MANY)
    p, half = student_tail(difference / stderr, freedom), student(freedom) * stderr
    why = f"difference {difference / scale:+.1%} ± {half / scale:.1%}, p {p:.2g} (Student's t)"
    if p < SURE:
        return "inconsistent", why
    return ("cannot tell", f"too few prompts: {why}") if half > COARSE * scale else ("consistent", why)


def judged(
    claim: Claim, results: Mapping[str, Any], records: Sequence[Record], weights: Mapping[str, str]
) -> list[Judged]:
    """Each number of a claim beside that of a run here, of checkpoints with these hashes."""
    facts, here, found = results["details"]["facts"], numbers_of(results, records), list[Judged]()
    other = "the claim does not say which prompts" if claim.data is None else ""
    if claim.data and claim.data.rendered_sha256 != results["details"]["prompts"]["sha256"]:
        other = "other prompts as the models read them: data, chat template or thinking mode"
    exact = facts["greedy"] and facts["gamma"] is not None and bool(weights) and claim.weights == weights
    exact = exact and claim.hardware.get("dtype") == facts["dtype"] == "float32"
    for name, ours in here:
        theirs = vars(claim.numbers)[name]
        if theirs is None or ours is None:
            continue
        value, answer, why = shown(ours), CANNOT_TELL, other
        if name == "speedup":
            value, answer, why = of_speed(claim.numbers, theirs, results, here)
        elif name in OF_TIMES:
            answer, why = compared(theirs, ours, log=True)
            if answer == "inconsistent":  # of another machine, or of one that does other work beside
                answer, why = "cannot tell", f"it is of a machine and its load: {claim.hardware.get('device', '-')}"
        elif not other and (exact or name == "texts"):
            limit = max(EXACT, theirs.rounding) if isinstance(theirs, Figure) else 0
            same = abs(ours.value - theirs.value) <= limit if isinstance(theirs, Figure) else ours == theirs
            answer = "consistent" if same else "inconsistent" if exact else "cannot tell"
            why = "same checkpoints and prompts" if exact else "maybe other checkpoints, arithmetic or drafts"
            why = f"{'equal' if same else 'not equal'}: {why}, at temperature 0, to {limit:g}"
        elif not other:
            answer, why = compared(theirs, ours, log=False)
        found.append(Judged(name, shown(theirs), value, answer, why))
    return found


def of_speed(claimed: Numbers, speedup: Figure, results: Mapping[str, Any], here: Numbers) -> tuple[str, Answer, str]:
    """The claimed speedup beside the claimed tokens per round over this machine's gamma c + v + o, times what a step of
    plain decoding costs here beside its call: the prediction, the answer and why."""
    own, ours, tokens = here.speedup, here.block_efficiency, claimed.block_efficiency
    gamma, corrected = results["details"]["facts"]["gamma"], results["speedup"]["corrected"]
    if tokens is None and claimed.alpha is not None and gamma is not None:
        tokens = Figure(value=theory.expected_tokens(claimed.alpha.value, gamma))
    if tokens is None or own is None or ours is None or not corrected:
        return "-", "cannot tell", "it has no tokens per round"
    value, error = own.value * tokens.value / ours.value, own.error(log=True)
    stderr = None if error is None else math.hypot(error, tokens.error(log=True) or 0.0) * value
    answer, why = compared(speedup, Figure(value=value, stderr=stderr, prompts=own.prompts), log=True)
    cost = f"{ours.value / corrected:.3g} for gamma c + v + o here, {own.value / corrected:.3g} for a plain step's rest"
    return f"{value:.3g} predicted", answer, f"its {tokens.value:.3g} tokens per round, {cost}: {why}"


def within(claimed: Numbers, gamma: int | None) -> list[Judged]:
    """What can be said of a claim without its weights: Theorem 3.8 for its alpha, gamma and c as printed, and that a
    round costs at least its drafter steps and one call of the target."""
    alpha, c, tokens, speedup = claimed.alpha, claimed.c, claimed.block_efficiency, claimed.speedup
    if alpha and c and gamma is not None:
        low, high = (
            theory.walltime_improvement(min(a, 1.0), gamma, b) for a, b in zip(alpha.ends, c.ends[::-1], strict=True)
        )
        most, expected = (gamma + 1) / (gamma * c.ends[0] + 1), theory.expected_tokens(alpha.value, gamma)
        found = []
        for name, figure in (("speedup", speedup), ("theorem_3_8", claimed.theorem_3_8)):
            if figure is None:
                continue
            fits = figure.ends[0] <= high and low <= figure.ends[1]
            impossible = name == "theorem_3_8" or figure.ends[0] > most
            answer: Answer = "consistent" if fits else "inconsistent" if impossible else "cannot tell"
            needed = figure.value * (gamma * c.value + 1)
            why = f"Theorem 3.8: {low:.2f} to {high:.2f}"
            why += "" if fits else f"; it needs {needed:.3g} tokens per round at v + o = 1, not {expected:.3g}"
            found.append(Judged(name, shown(figure), "-", answer, why))
        return found
    if speedup is None or tokens is None or not speedup.value:
        return []
    why = f"by its own numbers a round costs {tokens.value / speedup.value:.2f} target steps"
    if speedup.ends[0] <= tokens.ends[1]:
        return [Judged("speedup", shown(speedup), "-", "cannot tell", why)]
    return [Judged("speedup", shown(speedup), "-", "inconsistent", f"{why}, and its call of the target costs 1")]
