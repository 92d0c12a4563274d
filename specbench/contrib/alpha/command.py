"""`python -m specbench.alpha [outputs/RUN] [overrides]`: alpha of a target and a drafter over texts, without decoding.

With a run's folder the texts are what it decoded, and the overrides replace some of its own, as drafter.path=Q; without
one they are the prompts of the data.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.text import Text

from specbench.errors import ConfigError, answering, visible

FILE = "alpha.json"
BROKEN = 3  # exit code if a control does not differ from alpha


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="specbench.alpha", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="RUN or OVERRIDE", help="a run's folder first, if it is of one")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"where to write the numbers (in a run: {FILE})")
    args = parser.parse_args(arguments)
    with answering():
        run = Path(args.words.pop(0)) if args.words and "=" not in args.words[0] else None
        code = measure(run, args.words, args.json or (run / FILE if run else None))
    sys.exit(code)


def measure(run: Path | None, overrides: Sequence[str], file: Path | None) -> int:
    """Reads the texts with both models, prints the table and writes the numbers. Returns the exit code. Raises
    ConfigError."""
    from specbench.config.build import build
    from specbench.config.compose import compose
    from specbench.config.validate import check
    from specbench.contrib.alpha.teacher_forced import TeacherForced, read_alpha
    from specbench.results.atomic_files import as_json, write_text
    from specbench.results.reader import load_run

    stored = load_run(run) if run else None
    changed = {word.partition("=")[0] for word in overrides}
    own = (stored.result["overrides"] or []) if stored else []
    before = [word for word in own if word.partition("=")[0] not in changed]
    parts = build(check(compose([*before, *overrides, "executor=eager", "logger=none"])), announce=lambda text: None)
    refuse_no_models(parts)
    texts = list(of_run(stored, parts) if stored else of_prompts(parts))
    shown = track(texts, "reading texts", console=Console(stderr=True), transient=True)
    drafter: Any = parts.drafter.models[0]
    found: TeacherForced = read_alpha(parts.target, drafter, shown)
    if not found.alpha.positions:
        raise ConfigError("no text can be scored: each needs two tokens at least, behind a prompt that fits")
    numbers = as_dict(found) | {"target": parts.target.name, "drafter": parts.drafter.models[0].name,
                                "texts_of": "run" if stored else "data"}  # fmt: skip
    show_alpha(numbers, stored.result if stored else None)
    if file is not None:
        write_text(file, as_json(numbers))
        print(visible(f"written to {file}"))
    return BROKEN if found.sound is False else 0


def refuse_no_models(parts: Any) -> None:
    """Raises ConfigError if target or drafter cannot read a text by itself."""
    if not parts.drafter.models:
        raise ConfigError(
            f"drafter={parts.choices['drafter']} has no model that gives q along a text: choose one that has, as "
            "drafter=model drafter.path=Q, or run python -m specbench, which measures alpha of any drafter"
        )
    if parts.target.start_tokens is not None:
        raise ConfigError(f"target.path={parts.target.name} has an encoder: specbench.alpha reads decoders alone")


def of_run(stored: Any, parts: Any) -> Iterator[Any]:
    """What a run has decoded, behind its prompts; prompts of several turns are left out. Raises ConfigError."""
    from specbench.contrib.alpha.teacher_forced import ScoredText

    requests = {request.id: request for request in parts.rendered.values()}
    tokens: dict[str, list[int]] = {}
    for prompt, token in zip(stored.positions["prompt"], stored.positions["token"], strict=True):
        tokens.setdefault(prompt, []).append(token)
    if not requests.keys() & tokens.keys():
        raise ConfigError(f"{stored.folder} has no text of a prompt of one turn: give a run that has")
    for id, own in tokens.items():
        if id in requests:
            prompt = requests[id].tokens
            yield ScoredText(id, [*prompt, *own], len(prompt))


def of_prompts(parts: Any) -> Iterator[Any]:
    """The prompts themselves, scored from their second token on."""
    from specbench.contrib.alpha.teacher_forced import ScoredText

    for request in parts.rendered.values():
        yield ScoredText(request.id, request.tokens, 1)


def as_dict(found: Any) -> dict[str, Any]:
    """The numbers of alpha.json."""
    names = {"alpha": found.alpha, "shifted": found.shifted, "unmasked": found.unmasked}
    numbers = {name: {"mean": sums.mean if sums.positions else None, "stderr": sums.stderr}
               for name, sums in names.items()}  # fmt: skip
    return numbers | {"positions": sum(found.alpha.positions), "texts": len(found.alpha.positions),
                      "seconds": found.seconds, "sound": found.sound}  # fmt: skip


def show_alpha(numbers: dict[str, Any], run: dict[str, Any] | None) -> None:
    """Prints the table and what it means."""
    from specbench.results.table import Table
    from specbench.results.terminal import show

    names = {"alpha": "alpha, by teacher forcing", "shifted": "control: p of the next position",
             "unmasked": "control: the drafter sees the text"}  # fmt: skip
    rows = [{"": words, "mean of beta": _estimate(numbers[name])} for name, words in names.items()]
    if numbers["unmasked"]["mean"] is None and numbers["alpha"]["mean"] is not None:
        rows[2]["mean of beta"] = "none: its state is recurrent"
    of_run = {"alpha": "the run's alpha, where it tested", "alpha_on_target_text": "the run's alpha on plain text"}
    for key, words in of_run.items():
        if run and run[key]["mean"] is not None:
            rows.append({"": words, "mean of beta": _estimate(run[key])})
    whose = "the run's text" if run else "the prompts, which need not be the target's own text"
    title = f"{numbers['target']} and {numbers['drafter']} along {whose}"
    show(Table.of(rows, title, names=[""]))
    show(Text(f"{numbers['positions']:,} positions of {numbers['texts']} texts in {numbers['seconds']:.1f} s"))
    if numbers["sound"] is None:
        show(Text("One text has no error, so the controls decide nothing: give two texts or more."))
    elif not numbers["sound"]:
        show(Text("A control does not differ from alpha by three standard errors: do not trust this number."))


def _estimate(value: dict[str, Any]) -> str:
    """A mean with its standard error."""
    if value["mean"] is None:
        return "none: too few positions"
    return f"{value['mean']:.3f}" + ("" if value["stderr"] is None else f" +- {value['stderr']:.3f}")
