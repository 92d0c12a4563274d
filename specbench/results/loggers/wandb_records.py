"""What the W&B logger writes of a run: its configuration as columns, running numbers, rounds, and the summary."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbench.errors import visible
from specbench.results.fields import LOGGED, LOGGED_WHOLE, at
from specbench.results.schema import flatten

if TYPE_CHECKING:
    from specbench.stats.records import Group, RunRecord

MOST_ROUNDS = 5000  # in the history; of longer runs only every second, third, ... round


def config_columns(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration as columns: the option of each group by its name (`drafter: ngram`), its settings with a dot
    (`drafter.min_match: 2`), scalars as they are."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {key: choices[key]} if key in choices else {}
            found |= {f"{key}.{name}": entry for name, entry in value.items() if name != "_target_"}
        else:
            found[key] = value
    return found


class Running:
    """Sums over the groups so far."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def add(self, group: "Group") -> dict[str, float]:
        """Adds a group, and returns its numbers and those of all groups so far as keys of W&B: seconds are of decoding
        alone, without prefill."""
        from specbench.stats.formulas import speedup_of

        rounds = [r for result in group.results for r in result.speculative.rounds]
        own: dict[str, Any] = {
            "prompts": len(group.results),
            "rounds": len(rounds),
            "tokens": sum(r.tokens for r in rounds),
            "plain_tokens": sum(len(result.baseline.tokens) for result in group.results),
            "beta": sum(sum(r.beta) for r in rounds),
            "tested": sum(r.tested for r in rounds),
            "seconds": group.speculative.decode_seconds,
            "plain_seconds": group.baseline.decode_seconds,
        }
        self.sums.update(own)
        s = self.sums
        found: dict[str, float] = {f"progress/{name}": s[name] for name in ("prompts", "rounds", "tokens")}
        ratios = {"tokens_a_round": (s, "tokens", "rounds"), "alpha": (s, "beta", "tested"),
                  "last_tokens_a_round": (own, "tokens", "rounds"),
                  "last_tokens_per_second": (own, "tokens", "seconds")}  # fmt: skip
        found |= {f"progress/{name}": sums[a] / sums[b] for name, (sums, a, b) in ratios.items() if sums[b]}
        if s["tokens"] and s["plain_tokens"] and s["seconds"]:
            found["progress/speedup"] = float(speedup_of(s))
        return found


def history(record: "RunRecord") -> list[dict[str, Any]]:
    """The rounds in the order of decoding, as W&B's flat records; times in milliseconds."""
    from specbench.decoding.timer import DECODING

    rounds = [r for group in record.groups for r in group.speculative.rounds]
    every = -(-len(rounds) // MOST_ROUNDS) or 1
    return [
        {
            "round/number": number,
            "round/gamma": r.gamma,
            "round/accepted": r.accepted,
            "round/tokens": r.tokens,
            **({"round/beta": sum(r.beta) / len(r.beta)} if r.beta else {}),
            **{f"round/{lap}_ms": r.seconds[lap] * 1e3 for lap in DECODING},
        }
        for number, r in [*enumerate(rounds)][::every]
    ]


def summary(tree: Mapping[str, Any]) -> dict[str, object]:
    """What results.json holds as flat keys, `alpha` and `c` among them, without numbers that do not exist. An
    interval is two keys, as in `speedup/ci95/low` and `speedup/ci95/high`."""
    keys: dict[str, Any] = {name: at(tree, path) for name, path in LOGGED.items()}
    keys |= flatten({name: tree[name] for name in LOGGED_WHOLE})
    for kind in ("by_category", "by_length"):
        keys |= flatten({f"{kind}/{visible(name)}": numbers for name, numbers in tree[kind].items()})
    for what in ("conditional", "joint") if tree["acceptance"] else ():
        means = (entry["mean"] for entry in tree["acceptance"][what])
        keys |= {f"acceptance/{what}/{place}": mean for place, mean in enumerate(means, 1)}
    found: dict[str, object] = {}
    for key, value in keys.items():
        if "ci95" in key.rpartition("/")[2] or "ci95/" in key:
            found |= {f"{key}/{end}": number for end, number in zip(("low", "high"), value or (), strict=False)}
        elif value is not None and not isinstance(value, list):
            found[key] = value
    return found
