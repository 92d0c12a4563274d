"""What the W&B logger writes of a run: its configuration as columns, running numbers, rounds, and the summary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.errors import visible
from specbench.results.fields import LOGGED, LOGGED_WHOLE, at
from specbench.results.schema import flatten

if TYPE_CHECKING:
    from specbench.stats.records import Group, RunRecord

MOST_ROUNDS = 5000  # in the history; of longer runs only every second, third, ... round


def columns(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration as columns: the option of each group by its name (`drafter: ngram`), its settings with a dot
    (`drafter.min_match: 2`), scalars as they are."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key in choices:
                found[key] = choices[key]
            found |= {f"{key}.{name}": entry for name, entry in value.items() if name != "_target_"}
        else:
            found[key] = value
    return found


@dataclass
class Running:
    """Sums over the groups so far."""

    prompts: int = 0
    rounds: int = 0
    tokens: int = 0
    plain_tokens: int = 0
    betas: float = 0.0
    tested: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def add(self, group: "Group") -> dict[str, float]:
        """Adds a group, and returns its numbers and those of all groups so far as keys of W&B: seconds are of decoding
        alone, without prefill."""
        rounds = [r for result in group.results for r in result.speculative.rounds]
        tokens, seconds = sum(r.tokens for r in rounds), group.speculative.decode_seconds
        self.prompts += len(group.results)
        self.rounds += len(rounds)
        self.tokens += tokens
        self.plain_tokens += sum(len(result.baseline.tokens) for result in group.results)
        self.betas += sum(sum(r.beta) for r in rounds)
        self.tested += sum(r.tested for r in rounds)
        self.seconds += seconds
        self.plain_seconds += group.baseline.decode_seconds
        found = {
            "prompts": self.prompts,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "tokens_a_round": self.tokens / self.rounds if self.rounds else None,
            "alpha": self.betas / self.tested if self.tested else None,
            "speedup": self.speedup(),
            "last_tokens_a_round": tokens / len(rounds) if rounds else None,
            "last_tokens_per_second": tokens / seconds if seconds else None,
        }
        return {f"progress/{key}": value for key, value in found.items() if value is not None}

    def speedup(self) -> float | None:
        """Seconds a token of plain decoding over those of speculative decoding; None before there are any."""
        if not (self.tokens and self.plain_tokens and self.seconds):
            return None
        from specbench.stats.formulas import speedup_of

        return float(speedup_of(vars(self)))


def history(record: "RunRecord") -> list[dict[str, Any]]:
    """The rounds in the order of decoding, as W&B's flat records; times in milliseconds."""
    from specbench.decoding.timer import DECODING

    every = -(-sum(len(result.speculative.rounds) for result in record.results) // MOST_ROUNDS) or 1
    rounds = (r for group in record.groups for r in group.speculative.rounds)
    return [
        {
            "round/number": number,
            "round/gamma": r.gamma,
            "round/accepted": r.accepted,
            "round/tokens": r.tokens,
            **({"round/beta": sum(r.beta) / len(r.beta)} if r.beta else {}),
            **{f"round/{lap}_ms": r.seconds[lap] * 1e3 for lap in DECODING},
        }
        for number, r in enumerate(rounds)
        if number % every == 0
    ]


def summary(tree: Mapping[str, Any]) -> dict[str, object]:
    """What results.json holds as flat keys, `alpha` and `c` among them, without numbers that do not exist. An
    interval is two keys, as in `speedup/ci95/low` and `speedup/ci95/high`."""
    keys: dict[str, Any] = {name: at(tree, path) for name, path in LOGGED.items()}
    for name in LOGGED_WHOLE:
        keys |= flatten({name: tree[name]})
    for name, numbers in tree["by_category"].items():
        keys |= flatten({f"by_category/{visible(name)}": numbers})
    if tree["acceptance"]:
        for what in ("conditional", "joint"):
            means = (entry["mean"] for entry in tree["acceptance"][what])
            keys |= {f"acceptance/{what}/{place}": mean for place, mean in enumerate(means, 1)}
    found: dict[str, object] = {}
    for key, value in keys.items():
        if "ci95" in key.rpartition("/")[2] or "ci95/" in key:
            found |= {f"{key}/{end}": number for end, number in zip(("low", "high"), value or (), strict=False)}
        elif value is not None and not isinstance(value, list):
            found[key] = value
    return found
