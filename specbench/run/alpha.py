"""`python -m specbench.alpha [outputs/RUN] [overrides]`: alpha of a target and a drafter over texts, without decoding.

With a run's folder the texts are what it decoded, and the overrides replace some of its own, as drafter.path=Q; without
one they are the prompts of the data. `--reported 2.8` compares what an engine counted with the tokens per target call
that follow at this gamma.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.errors import ConfigError, answering, shown
from specbench.measure.sums import FEWEST, Estimate, Sums, estimates, student

if TYPE_CHECKING:
    from specbench.config.build import Parts
    from specbench.report.files import Run

FILE = "alpha.json"
BROKEN = 3  # exit code if the control does not differ from alpha
CLEAR = 3.0  # standard errors by which the control must differ from alpha


def main(words: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="specbench.alpha", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="RUN or OVERRIDE", help="a run's folder first, if it is of one")
    parser.add_argument("--reported", metavar="LENGTH", help="tokens per target call of an engine")
    args = parser.parse_args(words)
    with answering():
        first = Path(args.words[0]) if args.words else None  # a run's folder may have = in its name
        folder = Path(args.words.pop(0)) if first and (first.is_dir() or "=" not in first.name) else None
        if args.reported and not re.fullmatch(r"\d+(\.\d+)?", args.reported):
            raise ConfigError(f"--reported={shown(args.reported)} is not allowed: it must be a number, as 2.8")
        sound = measure(folder, args.words, Decimal(args.reported) if args.reported else None)
    if sound is False:
        sys.exit(BROKEN)


def measure(folder: Path | None, overrides: Sequence[str], reported: Decimal | None = None) -> bool | None:
    """Reads the texts with both models, prints the numbers, and writes them into a run's folder. Returns whether the
    control differs from alpha, None with too few texts. `reported` is compared with the length. Raises ConfigError."""
    from specbench.report import files

    run = files.read_run(folder) if folder else None
    from specbench.config.build import build
    from specbench.config.check import check
    from specbench.config.compose import compose_as

    words = [*overrides, "executor=eager", "logger=none"]
    choices, settings = (run.results["details"]["choices"], run.results["config"]) if run else ({}, {})
    parts = build(check(compose_as(choices, settings, words)), announce=lambda text: None)
    if not parts.drafter.models and run is not None and reported is not None and not overrides:
        agreement(length_of(run), reported)
        return None
    if not parts.drafter.models:
        raise ConfigError(
            f"drafter={parts.checked.names['drafter']} has no model that gives q along a text: choose one that has, "
            "as drafter=model drafter.path=Q, or run python -m specbench, which measures alpha of any drafter"
        )
    if parts.target.start_tokens is not None:
        raise ConfigError(f"target.path={parts.target.name} has an encoder: specbench.alpha reads decoders alone")
    try:
        texts = texts_of(run, parts)
        found = read_alpha(parts.target, parts.drafter.models[0], texts, parts.root.gamma, own=run is not None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    show(found, run, parts.root.gamma)
    named = {"target": parts.target.name, "drafter": parts.drafter.models[0].name, "gamma": parts.root.gamma}
    if reported is not None:
        named |= {"reported": float(reported), "agrees": agreement(found.length, reported)}
    if folder is not None:
        files.write_text(folder / FILE, json.dumps(asdict(found) | named, indent=1))
        print(f"written to {folder / FILE}")
    return found.sound


def texts_of(run: "Run | None", parts: "Parts") -> Iterator[tuple[Sequence[int], int]]:
    """Texts and where each is scored from: what a run has decoded, behind its prompts of one turn; without a run the
    prompts themselves, from their second token on. Raises ConfigError if the run has no such text."""
    prompts = {request.id: request.tokens for request in parts.rendered.values()}
    if run is None:
        yield from ((tokens, 1) for tokens in prompts.values())
        return
    texts = {record.id: record.speculative.ids for record in run.records if record.speculative is not None}
    if not prompts.keys() & texts.keys():
        raise ConfigError(f"{run.folder} has no text of a prompt of one turn: give a run that has")
    for name, ids in texts.items():
        if name in prompts:
            yield [*prompts[name], *ids], len(prompts[name])


@dataclass(frozen=True)
class TeacherForced:
    """Means of beta over texts, with texts as clusters. `shifted`, the control, compares q with p of the next position:
    a measurement that gives alpha there too is broken. `sound` says whether it differs clearly from alpha; None if
    there are too few texts for an error. `length` is tokens per target call."""

    alpha: Estimate
    length: Estimate
    shifted: Estimate
    sound: bool | None
    positions: int
    texts: int
    seconds: float


def read_alpha(
    target: Any, drafter: Any, texts: Iterable[tuple[Sequence[int], int]], gamma: int, own: bool
) -> TeacherForced:
    """beta at each position of texts, each given with the position that it is scored from, by the stock modules of two
    `LanguageModel`s, and the control: no cache, executor or loop of ours takes part. Raises ValueError if no text can
    be scored. For the length with drafts of gamma tokens, a text that is the target's `own` says which guess was taken:
    x, drawn from p, was accepted with probability min(1, q(x) / p(x)). Of another text only beta is known."""
    import torch

    from specbench.models.reference_forward import FinishedText
    from specbench.report.terminal import progress
    from specbench.run.readers import distribution

    clock, rows, every = time.perf_counter(), [], [*texts]
    with torch.inference_mode(), progress() as report:
        for number, (tokens, begin) in enumerate(every):
            report(number, len(every), "reading")
            read = tokens[: min(target.context, drafter.context)]
            text = FinishedText(read[:begin], read[begin:])
            if len(text.ids) < 2:  # the control needs a next position
                continue
            p, q = (distribution(text.scores(model), model.sampling) for model in (target, drafter))
            alpha, shifted = (float(torch.minimum(of, q[: len(of)]).sum()) for of in (p, p[1:]))
            p_x, q_x = (of[torch.arange(len(of)), text.ids] for of in (p, q))
            accepts = (q_x / p_x.clamp(min=1e-300)).clamp(max=1) if own else torch.minimum(p, q).sum(-1)
            rounds, kept = expected_rounds(accepts.tolist(), gamma)
            rows.append((float(len(p)), len(p) - 1.0, rounds, kept, alpha, shifted))
    if not rows:
        raise ValueError("no text can be scored: each needs two tokens at least, behind a prompt that fits")
    columns = dict(zip(("positions", "pairs", "rounds", "kept", "alpha", "shifted"), np.array(rows).T, strict=True))

    def means(s: Sums) -> dict[str, Any]:
        alpha, shifted = s["alpha"] / s["positions"], s["shifted"] / s["pairs"]
        return {"alpha": alpha, "shifted": shifted, "apart": shifted - alpha, "length": s["kept"] / s["rounds"]}

    found = estimates(columns, range(len(rows)), means, log=False)
    apart = found["apart"]
    sound = None if apart.stderr is None else abs(apart.value or 0.0) > CLEAR * apart.stderr
    positions, seconds = round(columns["positions"].sum()), time.perf_counter() - clock
    return TeacherForced(found["alpha"], found["length"], found["shifted"], sound, positions, len(rows), seconds)


def expected_rounds(accepts: Sequence[float], gamma: int) -> tuple[float, float]:
    """The expected number of rounds of gamma guesses that end in a text, and of the tokens that they keep.
    accepts[i] is the probability that the guess of token i is accepted, where there is one."""
    place = np.eye(gamma + 1)[0]  # how likely the next token is x_1 .. x_gamma of its round, or the bonus token
    rounds = 0.0
    for accepted in accepts:
        ends = place[-1] + (1 - accepted) * place[:-1].sum()
        place = np.append(ends, accepted * place[:-1])
        rounds += ends
    return rounds, len(accepts) - float(place @ np.arange(gamma + 1))


def length_of(run: "Run") -> Estimate:
    """Tokens per target call of a run, whose drafter need not be a model."""
    found, prompts = run.results["block_efficiency"], run.results["counts"]["prompts"]
    if found["stderr"] is None or prompts < FEWEST:
        return Estimate(found["mean"])
    half = student(prompts - 1) * found["stderr"]
    return Estimate(found["mean"], found["stderr"], (found["mean"] - half, found["mean"] + half))


def agreement(length: Estimate, reported: Decimal) -> bool | None:
    """Whether the interval of the length holds what an engine reported, by its digits; None without one. Prints it."""
    from specbench.measure.claim import Figure
    from specbench.report import terminal

    if length.value is None or length.ci95 is None:
        terminal.show(f"The engine reported {reported}: an interval to compare it with needs three texts.")
        return None
    low, high = length.ci95
    least, most = Figure.model_validate(str(reported)).ends
    agrees = low <= most and least <= high
    terminal.show(
        f"The drafter gives {length.value:.2f} tokens per target call on these prompts (95 % interval {low:.2f} to "
        f"{high:.2f}), the engine reported {reported}: these {'agree' if agrees else 'do not agree'}."
    )
    return agrees


def show(found: TeacherForced, run: "Run | None", gamma: int) -> None:
    """Prints the table and what it means."""
    import pandas as pd

    from specbench.report import tables, terminal

    rows = {
        "alpha, by teacher forcing": found.alpha,
        "control: p of the next position": found.shifted,
        f"tokens per target call at gamma={gamma}": found.length,
    }
    cells = {name: tables.mean({"mean": each.value, "stderr": each.stderr}) for name, each in rows.items()}
    if run is not None:
        cells["the run's alpha, where it tested"] = tables.mean(run.results["alpha"])
        cells["the run's alpha along plain decoding's text"] = tables.mean(run.results["alpha_on_target_text"])
    terminal.show(terminal.table(pd.DataFrame({"": cells.keys(), "mean": cells.values()})))
    terminal.show(f"{found.positions:,} positions of {found.texts} texts in {found.seconds:.1f} s")
    if found.sound is False:
        terminal.show("The control does not differ from alpha by three standard errors: do not trust this number.")
