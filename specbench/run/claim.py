"""`python -m specbench.claim FILE [overrides]`: runs what a claim says, and answers for each of its numbers whether it
is consistent with the run; `python -m specbench.claim --from RUN` writes the claim of a finished run.

The answer is "cannot tell" where a number has no interval or too few prompts, where prompts are others, and where
weights or data are missing. Exit code 3: a number that follows from models and prompts alone is inconsistent.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config.compose import GROUPS, LABELS, compose_as, fields
from specbench.errors import AbsentError, ConfigError, answering, unknown
from specbench.report import files

if TYPE_CHECKING:
    from specbench.measure.claim import Claim, Judged

FILE = "claim.yaml"
INCONSISTENT = 3  # exit code
# Settings that are not a claim's: labels, the machine's, and what would let a file run code of its own.
NOT_CLAIMED = {*LABELS, "peers", "device", "repeats", "_target_", "trust_remote_code"}


def main(words: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="specbench.claim", description=__doc__, formatter_class=form)
    parser.add_argument("words", nargs="*", metavar="FILE OVERRIDE", help="a claim, and where its models and data are")
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help=f"a run's folder: writes {FILE} into it")
    args = parser.parse_args(words)
    with answering():
        if args.run is not None:
            print(write_claim(args.run))
            return
        if not args.words:
            raise ConfigError("specbench.claim needs a file: give a claim, or --from RUN to write one")
        from specbench.run.command import interruptible

        with interruptible():
            fits = check_claim(Path(args.words[0]), args.words[1:])
    if not fits:
        sys.exit(INCONSISTENT)


def write_claim(folder: Path) -> Path:
    """Writes the claim of a finished run into its folder; returns its place. Raises ConfigError."""
    import yaml

    from specbench.measure.claim import numbers_of

    run = files.read_run(folder)
    known, details, config = run.results["provenance"], run.results["details"], claimed(run.results["config"])
    facts, prompts = details["facts"], details["prompts"]
    content = {
        "claim": 1,
        "source": f"specbench, run {run.results['name']} of {known['started']}, commit {known['git_sha']}",
        "target": config["target"]["path"],
        "drafter": config["drafter"].get("path") or details["choices"]["drafter"],
        "choices": claimed(details["choices"]),
        "settings": config,
        "data": {"sha256": facts["data"], "rendered_sha256": prompts["sha256"], "template": prompts["template"]},
        "versions": known["versions"],
        "hardware": {name: known[name] for name in ("device", "cpu", "threads")} | {"dtype": facts["dtype"]},
        "numbers": numbers_of(run.results, run.records).model_dump(exclude_defaults=True, mode="json"),
    }
    files.write_text(folder / FILE, yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))
    return folder / FILE


def claimed(config: Any) -> Any:
    """The settings of a configuration that are a claim's, at any depth; no empty mappings."""
    if isinstance(config, list):
        return [claimed(value) for value in config]
    if not isinstance(config, Mapping):
        return config
    kept = {key: claimed(value) for key, value in config.items() if key not in NOT_CLAIMED}
    return {key: value for key, value in kept.items() if value != {}}


def check_claim(path: Path, words: Sequence[str]) -> bool:
    """Runs the claims of a file, prints how many numbers have which answer, and the table of those about which there is
    more to say. Returns whether all but speed fits. Raises ConfigError."""
    import pandas as pd

    from specbench.measure.claim import read_claim, within
    from specbench.report import terminal

    rows, missing, fits = list[dict[str, Any]](), "", True
    try:
        claim = read_claim(path)
        for own in claim.each():
            try:
                found = answers(own, words)
            except AbsentError as error:
                found, missing = [], str(error)
            ran, alone = {each.number for each in found}, within(own.numbers, own.settings.get("gamma"))
            found += [each for each in alone if each.number not in ran or each.answer != "cannot tell"]
            fits &= all(each.answer != "inconsistent" or each.number == "speedup" for each in found)
            rows += [({"row": own.of} if claim.rows else {}) | vars(each) for each in found]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    said = []
    for answer in ("consistent", "inconsistent", "cannot tell"):
        names = dict.fromkeys(row["number"] for row in rows if row["answer"] == answer)
        count = sum(row["answer"] == answer for row in rows)
        said.append(f"{answer}: {count} of {len(rows)} numbers" + (f" ({', '.join(names)})" if names else ""))
    terminal.show("; ".join(said), "bold")
    if missing:
        terminal.show(f"Not run here, so that its numbers are compared with each other only: {missing}")
    known = [row for row in rows if (row["here"], row["why"]) != ("-", "-")]
    terminal.show(terminal.table(pd.DataFrame(known or rows)))
    if known and len(known) < len(rows):
        terminal.show(f"and {len(rows) - len(known)} numbers with nothing here to compare them with", "dim")
    terminal.show(f"claimed by {claim.source}", "dim")
    return fits


def answers(claim: "Claim", words: Sequence[str]) -> "list[Judged]":
    """The answer for each number of a claim by a run of what it says. Raises AbsentError without weights or data."""
    groups = GROUPS.keys() - NOT_CLAIMED
    for key in claim.choices.keys() - groups:  # another override, which could run code
        raise unknown(f"choices.{key}={claim.choices[key]}", groups, "choice of an option")
    if claim.needs:
        raise AbsentError(claim.needs)
    from specbench.run.jobs import finished_job, job_of

    content = claim.model_dump(mode="json", exclude={"numbers", "rows"})
    label = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]  # in whichever order
    named = [*claim.of.split(), *(word for word in words if word.partition("=")[0] not in LABELS), label]
    folder = Path("outputs/claim", fields("-".join(named)))
    config = compose_as(claim.choices, claimed(claim.settings), [*words, "logger=none", "name=claim"])
    job = job_of(config, folder, words)
    from specbench.measure.claim import judged
    from specbench.report import terminal
    from specbench.run.evaluate import run_logged  # which loads torch, after the hub's check
    from specbench.run.provenance import code

    run = None if job.checked.root.force else finished_job(job)
    if run is None or any(run.results["provenance"][key] != value for key, value in code().items()):
        run = run_logged(job, announce=print)
    terminal.summary(run.results, folder)
    same = claim.settings == claimed(run.results["config"])
    same = same and claim.choices == claimed(run.results["details"]["choices"])
    return judged(claim, run.results, run.records, same)
