"""Which faults of Algorithm 1 does the test of losslessness find in one run of the default size?

    python -m specbench temperature=1 gamma=4 logger=none hydra.run.dir=RUN  # once
    python experiments/verdict_power/make.py RUN [--runs 100] [--exact 400]

p and q along the texts of RUN are those of the stock modules. Runs are simulated on them, with one fault each: guesses,
verdicts, recovered and bonus tokens are drawn, and judged as `specbench/measure/sequential.py` judges a run. The
distributions of later positions stay those of the stored text, whatever was drawn. n positions, V vocabulary.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench.measure.record import read
from specbench.measure.sequential import (
    ALTERNATIVES,
    LEVEL,
    MARGIN,
    SURE,
    log_ratios,
    no_sums,
    p_value,
    residual,
)

GAMMA, CHUNK = 4, 128
SHIPPED = Path(__file__).parents[2] / "specbench" / "shipped"
Array = np.ndarray[Any, Any]
Tensor = torch.Tensor


def of_kind(kind: str) -> list[int]:
    """The numbers of the alternatives to a kind of draw."""
    return [i for i, one in enumerate(ALTERNATIVES) if one.kind == kind]


def distributions(run: Path) -> tuple[Tensor, Tensor, list[int]]:
    """p and q [n, V] in float64 along the texts of a run, and the number of tokens of each text."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "target")
    models = [
        AutoModelForCausalLM.from_pretrained(SHIPPED / name, dtype=torch.float32) for name in ("target", "drafter")
    ]
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    lengths = []
    for record in read(run / "prompts.jsonl"):
        assert record.speculative is not None
        prompt, new = tokenizer(record.prompt)["input_ids"], record.speculative.ids
        assert len(prompt) == record.prompt_tokens, f"{record.id} was tokenized otherwise"
        text = torch.tensor([[*prompt, *new]])
        for model, parts in zip(models, found, strict=True):
            parts.append(model(text).logits[0, len(prompt) - 1 : -1].double().softmax(-1))
        lengths.append(len(new))
    return torch.cat(found[0]), torch.cat(found[1]), lengths


def normal(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True).clamp(min=1e-300)


def cooled(p: Tensor, temperature: float) -> Tensor:
    return normal(p ** (1 / temperature))


def only(p: Tensor, tokens: Tensor) -> Tensor:
    """p [n, V] on some tokens [V] bool; unchanged where it has none of them."""
    some = p * tokens
    return normal(torch.where(some.sum(-1, keepdim=True) > 0, some, p))


def top(p: Tensor, k: int) -> Tensor:
    return normal(torch.where(p >= p.topk(k).values[:, -1:], p, 0.0))


def ids(p: Tensor) -> Tensor:
    return torch.arange(p.shape[-1])


def random_eighth(p: Tensor) -> Tensor:
    return torch.rand(p.shape[-1], generator=torch.Generator().manual_seed(8)) >= 1 / 8


@dataclass(frozen=True)
class Fault:
    """What differs from Algorithm 1: distributions as functions of p and the reported q [n, V], and the probability
    that a guess is accepted, from its p / q [m] and its place [m]."""

    name: str
    guess: Callable[[Tensor, Tensor], Tensor] = lambda p, q: q
    recovered: Callable[[Tensor, Tensor], Tensor] = residual
    bonus: Callable[[Tensor, Tensor], Tensor] = lambda p, q: p
    accept: Callable[[Array, Array], Array] = lambda ratio, place: ratio
    one_number: bool = False
    one_noise: bool = False


def lenient(lenience: float, at: int = 0) -> Callable[[Array, Array], Array]:
    return lambda ratio, place: np.where((place == at) | (at == 0), ratio / lenience, ratio)


def surely(above: float) -> Callable[[Array, Array], Array]:
    return lambda ratio, place: np.where(ratio > above, 1.0, ratio)


EXACT = Fault("none")
GROUPS: list[tuple[Callable[[Tensor], Tensor], list[Fault]]] = [  # how q is reported, and the faults
    (
        lambda q: q,
        [
            Fault("lenience .95 at guess 3 only", accept=lenient(0.95, 3)),
            Fault("lenience .95 everywhere", accept=lenient(0.95)),
            Fault("lenience .9 everywhere", accept=lenient(0.9)),
            Fault("lenience .9 at guess 3 only", accept=lenient(0.9, 3)),
            Fault("lenience .5 at guess 4 only", accept=lenient(0.5, 4)),
            Fault("recovered token drawn from p", recovered=lambda p, q: p),
            Fault("recovered token drawn with q of the next place", recovered=lambda p, q: residual(p, q.roll(-1, 0))),
            Fault("recovered token drawn at temperature .9", recovered=lambda p, q: cooled(residual(p, q), 0.9)),
            Fault(
                "recovered token never with id % 8 = 3", recovered=lambda p, q: only(residual(p, q), ids(p) % 8 != 3)
            ),
            Fault(
                "recovered token never of a random eighth of the ids",
                recovered=lambda p, q: only(residual(p, q), random_eighth(p)),
            ),
            Fault("recovered token drawn with the noise of the guess", one_noise=True),
            Fault("bonus token drawn at temperature .9", bonus=lambda p, q: cooled(p, 0.9)),
            Fault("bonus token drawn at temperature .7", bonus=lambda p, q: cooled(p, 0.7)),
            Fault("bonus token drawn at temperature 1.2", bonus=lambda p, q: cooled(p, 1.2)),
            Fault("bonus token is the likeliest", bonus=lambda p, q: top(p, 1)),
            Fault("bonus token only with an even id", bonus=lambda p, q: only(p, ids(p) % 2 == 0)),
            Fault("bonus token drawn from p - q of the last guess", bonus=lambda p, q: residual(p, q.roll(1, 0))),
            Fault("bonus token drawn from p - q of its own place", bonus=residual),
            Fault("guess drawn at temperature .9, q reported at 1", guess=lambda p, q: cooled(q, 0.9)),
            Fault("guess drawn from the top 50 of q, q reported whole", guess=lambda p, q: top(q, 50)),
            Fault("one random number for all guesses of a round", one_number=True),
            Fault("guess accepted surely above p / q = .95", accept=surely(0.95)),
            Fault("guess accepted surely above p / q = .8", accept=surely(0.8)),
        ],
    ),
    (
        lambda q: cooled(q, 0.9),
        [Fault("guess drawn at temperature 1, q reported at .9", guess=lambda p, q: cooled(q, 1 / 0.9))],
    ),
    (
        lambda q: 0.95 * q + 0.05 / q.shape[-1],
        [
            Fault(
                "reported q has 5 % of uniform noise that guesses have not",
                guess=lambda p, q: normal((q - 0.05 / q.shape[-1]).clamp(min=0)),
            )
        ],
    ),
]


def draw(p: Tensor, runs: int, rng: np.random.Generator) -> Array:
    """[n, runs] tokens from p [n, V]."""
    sums = p.cumsum(-1).numpy()
    u = rng.random((len(p), runs)) * sums[:, -1:]
    found = [np.searchsorted(own, v, side="right") for own, v in zip(sums, u, strict=True)]
    return np.stack(found).clip(max=p.shape[-1] - 1)


def races(q: Tensor, rest: Tensor, runs: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """[n, runs] draws from q and from rest [n, V] with the same noise."""
    guesses, recovered = [], []
    with np.errstate(divide="ignore"):
        for one, other in zip(q.numpy().astype(np.float32), rest.numpy().astype(np.float32), strict=True):
            noise = rng.standard_exponential((runs, len(one)), np.float32).clip(min=1e-30)
            guesses.append((noise / one).argmin(1))
            recovered.append((noise / other).argmin(1))
    return np.stack(guesses), np.stack(recovered)


@dataclass
class Draws:
    """What runs drew at n positions: arrays [n, runs]."""

    tested: Array
    accepted: Array
    last: Array  # whether the guess is the last one of its draft
    ratio: Array  # p / q of it
    least: Array  # the smallest of 1 and the p / q of the round's guesses before it
    guess: Array
    token: Array


def simulate(fault: Fault, p: Tensor, q: Tensor, lengths: list[int], runs: int, rng: np.random.Generator) -> Draws:
    """Runs with a fault, of p and the reported q [n, V]."""
    n, rest = len(p), fault.recovered(p, q)
    if fault.one_noise:
        guess, recovered = races(q, rest, runs, rng)
    else:
        guess, recovered = draw(fault.guess(p, q), runs, rng), draw(rest, runs, rng)
    bonus, number = draw(fault.bonus(p, q), runs, rng), rng.random((n, runs))
    row = np.arange(n)[:, None]
    ratio = p.numpy()[row, guess] / np.maximum(q.numpy()[row, guess], 1e-300)
    tested, accepted, last = np.zeros((3, n, runs), bool)
    least, begin = np.ones((n, runs)), 0
    for length in lengths:
        place, gamma, lowest, first = np.zeros(runs, int), np.zeros(runs, int), np.ones(runs), np.zeros(runs)
        for t in range(begin, begin + length):
            new = place == 0
            gamma[new], lowest[new], first[new] = min(GAMMA, begin + length - t - 1), 1.0, number[t, new]
            tested[t], last[t], least[t] = place < gamma, place == gamma - 1, lowest
            u = first if fault.one_number else number[t]
            accepted[t] = tested[t] & (u < fault.accept(ratio[t], place + 1))
            lowest = np.minimum(lowest, ratio[t])
            place = np.where(accepted[t], place + 1, 0)
        begin += length
    token = np.where(accepted, guess, np.where(tested, recovered, bonus))
    return Draws(tested, accepted, last, ratio, least, guess, token)


def judge(found: Draws, p: Tensor, q: Tensor) -> Array:
    """The p-value of the test of every run."""
    runs = found.token.shape[1]
    logs, impossible = torch.zeros(len(no_sums()), runs, dtype=torch.double), np.zeros(runs, bool)
    rejected = found.tested & ~found.accepted
    impossible |= (rejected & (found.ratio > SURE)).any(0)
    before = np.concatenate([np.zeros((1, runs), bool), found.tested[:-1]])
    for begin in range(0, len(p), CHUNK):
        here = slice(begin, begin + CHUNK)
        own = Draws(*(torch.from_numpy(values[here]) for values in vars(found).values()))
        P, Q, R = p[here].float(), q[here].float(), residual(p[here], q[here]).float()
        lost, free = own.tested & ~own.accepted, ~own.tested
        impossible |= (lost & (R.gather(1, own.token) == 0)).any(0).numpy()
        for kind, base, drawn, where, more in (
            ("bonus", P, own.token, free, ()),
            ("behind", P, own.token, free & torch.from_numpy(before[here]), (q.roll(1, 0)[here].float(),)),
            ("own", P, own.token, free, (Q,)),
            ("guess", Q, own.guess, own.tested, ()),
            ("recovered", R, own.token, lost, ()),
            ("after", R, own.token, lost, (Q,)),
        ):
            for i in of_kind(kind):
                logs[i] += (log_ratios(ALTERNATIVES[i].change, base, *more)[0].gather(1, drawn) * where).sum(0)
        favoured = (q[here] > MARGIN * p[here]).double()
        mean = (p[here] * favoured).sum(-1, keepdim=True).clamp(max=1).expand(own.tested.shape)
        add(logs, "favoured", mean, favoured.gather(1, own.token) > 0, own.tested)
        add(logs, "accepted", own.ratio.clamp(max=1), own.accepted, own.tested, own.least, own.last.double())
    values = []
    for column in logs.T.numpy():
        sums = no_sums()
        sums[:, 0] = column
        values.append(p_value(sums)[0])
    return np.where(impossible, 0.0, values)


def add(logs: Tensor, kind: str, mean: Tensor, happened: Tensor, where: Tensor, *more: Tensor) -> None:
    """Adds the log ratios of events [n, runs] to logs [K, runs]."""
    for i in of_kind(kind):
        ratios, _ = log_ratios(ALTERNATIVES[i].change, mean.flatten(), *(part.flatten() for part in more))
        own = ratios.gather(1, happened.flatten()[:, None].long()).view(where.shape)
        logs[i] += torch.where(where, own, 0.0).sum(0)


def measure(run: Path, runs: int, exact: int) -> pd.DataFrame:
    """By fault, how many of the simulated runs fail."""
    p, whole, lengths = distributions(run)
    rows = []
    for seed, (report, faults) in enumerate(GROUPS):
        q, rng = report(whole), np.random.default_rng(seed)
        for fault, count in [*([(EXACT, exact)] if seed == 0 else []), *((fault, runs) for fault in faults)]:
            started = time.perf_counter()
            failed = int((judge(simulate(fault, p, q, lengths, count, rng), p, q) < LEVEL).sum())
            rows.append({"planted fault": fault.name, "runs": count, "failed": failed, "share": failed / count})
            print(f"{fault.name}: {failed} of {count} failed ({time.perf_counter() - started:.1f} s)", flush=True)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--runs", type=int, default=100, help="simulated runs with each fault")
    parser.add_argument("--exact", type=int, default=400, help="simulated runs without a fault")
    args = parser.parse_args()
    with torch.inference_mode():
        table = measure(args.run, args.runs, args.exact)
    table.to_csv(Path(__file__).with_name("results.csv"), index=False)
    print(table.to_markdown(index=False))


if __name__ == "__main__":
    main()
