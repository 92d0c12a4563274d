"""The power of the losslessness test: faults planted in simulated runs of the default size, and judged by its sums.

    python experiments/verdict_power/make.py
    python experiments/verdict_power/make.py --stored       # table and figure again, from results.csv

It takes about three minutes on one thread. The default run decodes its 32 prompts once. p and q along its texts, by the
stock modules, go to outputs/verdict_power/laws.npz. A simulated run draws guesses, verdicts and tokens from these laws,
with one fault; the laws of later positions stay those of the stored text. Each group of faults is stored when it is
done, and the same command goes on from there.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, Table, commit, here, machine, make, number, text
from figures import named

from specbench.config.build import build
from specbench.config.paths import conf_dir
from specbench.config.validate import check
from specbench.errors import ConfigError
from specbench.models.reference_forward import stock_logits
from specbench.run.run import run
from specbench.stats.draw_sums import SURE
from specbench.stats.test_statistics import (
    ALTERNATIVES,
    OF_KIND,
    SUMS,
    VERDICT_LEVEL,
    classes,
    columns,
    event_ratios,
    log_ratios,
    p_value_of_sums,
)
from specbench.stats.verdict_records import MARGIN, OVER

RUNS, EXACT_RUNS = 100, 400  # simulated, with each fault and without one
STORED = Path("outputs/verdict_power")
GAMMA, CHUNK = 4, 128
Array = np.ndarray[Any, Any]
Tensor = torch.Tensor


def laws() -> tuple[Tensor, Tensor, Array]:
    """p and q [n, V] in float64 along the texts of the default run, and the number of tokens of each text."""
    path = STORED / "laws.npz"
    if not path.is_file():
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = compose("config", overrides=["logger=none", "verdict_tokens=0"], return_hydra_config=True)
        parts = build(check(config))
        with tempfile.TemporaryDirectory() as folder:
            _, record = run(parts, Path(folder), lambda done, total, what: print(f"{what} {done} of {total}"))
        found = []
        with torch.inference_mode():
            for model in (parts.target, parts.drafter.models[0]):
                texts = [(r.request.tokens, [*r.speculative.tokens]) for r in record.results]
                logits = [stock_logits(model, torch.tensor([[*a, *b]]), len(a)) for a, b in texts]
                found.append(torch.cat(logits).double().softmax(-1).float().numpy())
        STORED.mkdir(parents=True, exist_ok=True)
        np.savez(path, p=found[0], q=found[1], lengths=[len(r.speculative.tokens) for r in record.results])
    stored = np.load(path)
    p, q = (torch.from_numpy(stored[name]).double() for name in ("p", "q"))
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), stored["lengths"]


def normal(law: Tensor) -> Tensor:
    return law / law.sum(-1, keepdim=True).clamp(min=1e-300)


def cooled(law: Tensor, temperature: float) -> Tensor:
    return normal(law ** (1 / temperature))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) [n, V], and p where nothing is left."""
    rest = (p - q).clamp(min=0)
    return normal(torch.where(rest.sum(-1, keepdim=True) > 0, rest, p))


def only(law: Tensor, tokens: Tensor) -> Tensor:
    """A law [n, V] on some tokens [V] bool; unchanged where it has none of them."""
    some = law * tokens
    return normal(torch.where(some.sum(-1, keepdim=True) > 0, some, law))


def top(law: Tensor, k: int) -> Tensor:
    return normal(torch.where(law >= law.topk(k).values[:, -1:], law, 0.0))


def shifted(law: Tensor, by: int) -> Tensor:
    """The laws of other positions."""
    return law.roll(by, 0)


def ids(law: Tensor) -> Tensor:
    return torch.arange(law.shape[-1])


def same(p: Tensor, q: Tensor) -> Tensor:
    return q


@dataclass(frozen=True)
class Fault:
    """What differs from Algorithm 1. Laws are functions of p and the reported q [n, V]; `accept` gives the probability
    that a guess is accepted from its p / q [m] and its place [m]."""

    told: str
    guess: Callable[[Tensor, Tensor], Tensor] = same
    recovered: Callable[[Tensor, Tensor], Tensor] = residual
    bonus: Callable[[Tensor, Tensor], Tensor] = lambda p, q: p
    accept: Callable[[Array, Array], Array] = lambda ratio, place: ratio
    one_number: bool = False
    one_noise: bool = False


def lenient(lenience: float, at: int = 0) -> Callable[[Array, Array], Array]:
    return lambda ratio, place: np.where((place == at) | (at == 0), ratio / lenience, ratio)


def surely(above: float) -> Callable[[Array, Array], Array]:
    return lambda ratio, place: np.where(ratio > above, 1.0, ratio)


def random_eighth(law: Tensor) -> Tensor:
    return torch.rand(law.shape[-1], generator=torch.Generator().manual_seed(8)) >= 1 / 8


EXACT = Fault("none")
GROUPS: dict[str, tuple[Callable[[Tensor], Tensor], list[Fault]]] = {  # how q is reported, and the faults
    "q": (
        lambda q: q,
        [
            Fault("lenience .95 at guess 3 only", accept=lenient(0.95, 3)),
            Fault("lenience .95 everywhere", accept=lenient(0.95)),
            Fault("lenience .9 everywhere", accept=lenient(0.9)),
            Fault("lenience .9 at guess 3 only", accept=lenient(0.9, 3)),
            Fault("lenience .5 at guess 4 only", accept=lenient(0.5, 4)),
            Fault("recovered token drawn from p", recovered=lambda p, q: p),
            Fault("recovered token drawn with q of the next place", recovered=lambda p, q: residual(p, shifted(q, -1))),
            Fault("recovered token drawn at temperature .9", recovered=lambda p, q: cooled(residual(p, q), 0.9)),
            Fault("recovered token never with id % 8 = 3",
                  recovered=lambda p, q: only(residual(p, q), ids(p) % 8 != 3)),
            Fault("recovered token never of a random eighth of the ids",
                  recovered=lambda p, q: only(residual(p, q), random_eighth(p))),
            Fault("recovered token drawn with the noise of the guess", one_noise=True),
            Fault("bonus token drawn at temperature .9", bonus=lambda p, q: cooled(p, 0.9)),
            Fault("bonus token drawn at temperature .7", bonus=lambda p, q: cooled(p, 0.7)),
            Fault("bonus token drawn at temperature 1.2", bonus=lambda p, q: cooled(p, 1.2)),
            Fault("bonus token is the likeliest", bonus=lambda p, q: top(p, 1)),
            Fault("bonus token only with an even id", bonus=lambda p, q: only(p, ids(p) % 2 == 0)),
            Fault("bonus token drawn from p - q of the last guess", bonus=lambda p, q: residual(p, shifted(q, 1))),
            Fault("bonus token drawn from p - q of its own place", bonus=residual),
            Fault("guess drawn at temperature .9, q reported at 1", guess=lambda p, q: cooled(q, 0.9)),
            Fault("guess drawn from the top 50 of q, q reported whole", guess=lambda p, q: top(q, 50)),
            Fault("one random number for all guesses of a round", one_number=True),
            Fault("guess accepted surely above p / q = .95", accept=surely(0.95)),
            Fault("guess accepted surely above p / q = .8", accept=surely(0.8)),
        ],
    ),
    "cooler q": (
        lambda q: cooled(q, 0.9),
        [Fault("guess drawn at temperature 1, q reported at .9", guess=lambda p, q: cooled(q, 1 / 0.9))],
    ),
    "uniform q": (
        lambda q: 0.95 * q + 0.05 / q.shape[-1],
        [Fault("reported q has 5 % of uniform noise that guesses have not",
               guess=lambda p, q: normal((q - 0.05 / q.shape[-1]).clamp(min=0)))],
    ),
}  # fmt: skip


def draw(law: Tensor, runs: int, rng: np.random.Generator) -> Array:
    """[n, runs] tokens from laws [n, V]."""
    sums = law.cumsum(-1).numpy()
    u = rng.random((len(law), runs)) * sums[:, -1:]
    return np.stack([np.searchsorted(own, v, side="right") for own, v in zip(sums, u, strict=True)]).clip(
        max=law.shape[-1] - 1
    )


def races(q: Tensor, rest: Tensor, runs: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """[n, runs] draws from q and from rest [n, V] with the same noise."""
    found: list[tuple[Array, Array]] = []
    with np.errstate(divide="ignore"):
        for one, other in zip(q.numpy().astype(np.float32), rest.numpy().astype(np.float32), strict=True):
            noise = rng.standard_exponential((runs, len(one)), np.float32).clip(min=1e-30)
            found.append(((noise / one).argmin(1), (noise / other).argmin(1)))
    return np.stack([a for a, _ in found]), np.stack([b for _, b in found])


@dataclass
class Draws:
    """What runs drew at n positions: arrays [n, runs]."""

    tested: Array
    stands: Array
    place: Array  # of the guess, from 1 on
    ratio: Array  # p / q of it
    least: Array  # the smallest p / q of the round's guesses before it, at most 1
    guess: Array
    token: Array


def simulate(fault: Fault, p: Tensor, q: Tensor, lengths: Array, runs: int, rng: np.random.Generator) -> Draws:
    """Runs with a fault, of laws p and reported q [n, V]."""
    n, rest = len(p), fault.recovered(p, q)
    if fault.one_noise:
        guess, recovered = races(q, rest, runs, rng)
    else:
        guess, recovered = draw(fault.guess(p, q), runs, rng), draw(rest, runs, rng)
    bonus = draw(fault.bonus(p, q), runs, rng)
    row = np.arange(n)[:, None]
    ratio = p.numpy()[row, guess] / np.maximum(q.numpy()[row, guess], 1e-300)
    number = rng.random((n, runs))
    tested, stands = np.zeros((2, n, runs), bool)
    places, least = np.zeros((n, runs), int), np.ones((n, runs))
    begin = 0
    for length in lengths:
        place, gamma, lowest, first = np.zeros(runs, int), np.zeros(runs, int), np.ones(runs), np.zeros(runs)
        for t in range(begin, begin + length):
            new = place == 0
            gamma[new], lowest[new], first[new] = min(GAMMA, begin + length - t - 1), 1.0, number[t, new]
            places[t], least[t] = place + 1, lowest
            tested[t] = place < gamma
            stands[t] = tested[t] & ((first if fault.one_number else number[t]) < fault.accept(ratio[t], places[t]))
            lowest = np.minimum(lowest, ratio[t])
            place = np.where(stands[t], place + 1, 0)
        begin += length
    token = np.where(stands, guess, np.where(tested, recovered, bonus))
    return Draws(tested, stands, places, ratio, least, guess, token)


def joined(parts: list[Draws]) -> Draws:
    return Draws(*(np.concatenate([getattr(part, name) for part in parts], 1) for name in vars(parts[0])))


def judge(found: Draws, p: Tensor, q: Tensor) -> Array:
    """The p-value of the verdict of every run."""
    runs = found.token.shape[1]
    logs, impossible = torch.zeros(len(ALTERNATIVES), runs, dtype=torch.double), np.zeros(runs, bool)
    rejected = found.tested & ~found.stands
    impossible |= (rejected & (found.ratio > SURE)).any(0)
    before = np.concatenate([np.zeros((1, runs), bool), found.tested[:-1]])
    for begin in track(range(0, len(p), CHUNK), description="judging", transient=True):
        here = slice(begin, begin + CHUNK)
        own = Draws(*(torch.from_numpy(values[here]) for values in vars(found).values()))
        law, other, last = p[here], q[here], shifted(q, 1)[here]
        rest = residual(law, other)
        lost, free = own.tested & ~own.stands, ~own.tested
        impossible |= (lost & (rest.gather(1, own.token) == 0)).any(0).numpy()
        excess, order = torch.where(other > MARGIN * law, other - law, 0.0).topk(OVER)
        favoured = torch.zeros_like(law).scatter_(1, order, (excess > 0).double())
        every = torch.ones_like(free)
        for kind, base, drawn, where, more in (
            ("token", law, own.token, every, ()),
            ("untested", law, own.token, free, ()),
            ("bonus", law, own.token, free & torch.from_numpy(before[here]), (last,)),
            ("own place", law, own.token, free, (other,)),
            ("guess", other, own.guess, own.tested, ()),
            ("recovered", rest, own.token, lost, ()),
            ("after", rest, own.token, lost, (other,)),
        ):
            given = [values.float() for values in (base, *more)]  # as `of_tokens` has them
            for i in OF_KIND[kind]:
                logs[i] += (log_ratios(ALTERNATIVES[i].change, *given).gather(1, drawn) * where).sum(0)
        table = classes(law.shape[-1], law.device)
        of_favoured = (law * favoured).sum(-1, keepdim=True), favoured.gather(1, own.token)[..., None]
        for kind, mean, happened, where in (
            ("favoured", *of_favoured, own.tested),
            ("untested class", law @ table, table[own.token], free),
            ("recovered class", rest @ table, table[own.token], lost),
        ):
            ratios = event_ratios(kind, mean.clamp(0, 1))[0]
            for i, column, ratio in zip(OF_KIND[kind], columns(kind), ratios.unbind(1), strict=True):
                chosen = torch.where(happened[..., column] > 0, ratio[:, 1:], ratio[:, :1])
                logs[i] += (chosen * where).sum(0)
        mean = own.ratio.clamp(max=1)[own.tested][:, None]
        ratios = event_ratios("stands", mean, own.place[own.tested], own.least[own.tested])[0]
        for i, ratio in zip(OF_KIND["stands"], ratios.unbind(1), strict=True):
            chosen = torch.zeros(own.tested.shape, dtype=torch.double)
            chosen[own.tested] = torch.where(own.stands[own.tested], ratio[:, 1], ratio[:, 0])
            logs[i] += chosen.sum(0)
    sums = np.zeros((len(ALTERNATIVES), SUMS))
    values = []
    for column in logs.T.numpy():
        sums[:, 0] = column
        values.append(p_value_of_sums(sums)[0])
    return np.where(impossible, 0.0, values)


def collect(inputs: list[str]) -> Measured:
    """By fault, the share of runs that failed."""
    if inputs:
        raise ConfigError(f"{inputs[0]} is not a setting of this measurement: it has none")
    torch.set_grad_enabled(False)
    facts = here()
    p, whole, lengths = laws()
    rows: list[Row] = []
    for seed, (name, (report, faults)) in enumerate(GROUPS.items()):
        wanted = [*([(EXACT, EXACT_RUNS)] if name == "q" else []), *((fault, RUNS) for fault in faults)]
        path = STORED / f"{name.replace(' ', '_')}.npz"
        if not path.is_file():
            q, rng = report(whole), np.random.default_rng(seed)
            parts = [simulate(fault, p, q, lengths, runs, rng) for fault, runs in track(wanted, "simulating")]
            np.savez(path, values=judge(joined(parts), p, q))
        values, end = np.load(path)["values"], 0
        for fault, runs in wanted:
            begin, end = end, end + runs
            failed = int((values[begin:end] < VERDICT_LEVEL).sum())
            rows.append({"fault": fault.told, "runs": runs, "failed": failed, "share": failed / runs})
    return Measured(rows, machine(facts, "float32"), commit(facts))


TABLE: Table = {"planted fault": text("fault"), "runs": number("runs", ".0f"), "failed": number("failed", ".0f"),
                "share": number("share", ".3g")}  # fmt: skip


def draw_shares(rows: list[Row]) -> Figure:
    """A bar for each fault."""
    figure, axes = plt.subplots(figsize=(8, 0.24 * len(rows) + 1), layout="constrained")
    axes.barh(range(len(rows)), [row["share"] for row in rows])
    named(axes, [row["fault"] for row in rows], "share of runs that fail")
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw_shares)
