"""`python -m specbench.claim FILE [overrides]`: runs what a claim says, and answers for each of its numbers whether it
is consistent with the run; `python -m specbench.claim --from RUN` writes the claim of a finished run.

The answer is "cannot tell" where a number has no interval or too few prompts, where prompts are others, and where
weights or data are missing. Exit code 3: a number that follows from models and prompts alone is inconsistent.
"""

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.config.compose import LABELS
from specbench.errors import AbsentError, ConfigError, answering

if TYPE_CHECKING:
    from specbench.measure.claim import Claim
    from specbench.report.files import Run

FILE = "claim.yaml"
INCONSISTENT = 3  # exit code
# Settings that are not a claim's: labels, the machine's, and what would let a file run code of its own.
NOT_CLAIMED = {*LABELS, "peers", "device", "repeats", "_target_", "trust_remote_code"}
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def main(words: list[str] | None = None) -> None:
    """Runs the command; a mistake of the user's becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="specbench.claim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="FILE or OVERRIDE", help="a claim, and where its models and data are"
    )
    parser.add_argument("--from", dest="run", type=Path, metavar="RUN", help=f"a run's folder: writes {FILE} into it")
    args = parser.parse_args(words)
    with answering():
        if args.run is not None:
            print(write_claim(args.run))
            return
        if not args.words or ("=" in args.words[0] and not Path(args.words[0]).is_file()):
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
    from specbench.report import files

    run = files.read_run(folder)
    results, facts, known = run.results, run.results["details"]["facts"], run.results["provenance"]
    config, prompts = claimed(results["config"]), results["details"]["prompts"]
    content = {
        "claim": 1,
        "source": f"specbench, run {results['name']} of {known['started']}, commit {known['git_sha']}",
        "target": config["target"]["path"],
        "drafter": config["drafter"].get("path") or results["details"]["choices"]["drafter"],
        "choices": claimed(results["details"]["choices"]),
        "settings": config,
        "weights": weights_of(results["config"]),
        "data": {"sha256": facts["data"], "rendered_sha256": prompts["sha256"], "template": prompts["template"]},
        "versions": known["versions"],
        "hardware": {name: known[name] for name in ("device", "cpu", "threads")} | {"dtype": facts["dtype"]},
        "numbers": numbers_of(results, run.records).model_dump(exclude_defaults=True, mode="json"),
    }
    files.write_text(folder / FILE, yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))
    return folder / FILE


def claimed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that are a claim's, at any depth; no empty mappings."""
    kept = {key: claimed(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in kept.items() if key not in NOT_CLAIMED and value != {}}


def weights_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of the checkpoints on this machine that a configuration names, by its settings; none of random weights."""
    from huggingface_hub import try_to_load_from_cache

    from specbench.models.checkpoint import local_path

    found = dict[str, str]()
    for role in ("target", "drafter"):
        name, folder = config[role].get("path"), Path()
        if name is None or config[role].get("weights") == "random":
            continue
        if not (folder := local_path(name)).is_dir():
            file = try_to_load_from_cache(name, "config.json", revision=config[role].get("revision"))
            folder = Path(file).parent if isinstance(file, str) else folder
        digest = hashlib.sha256()
        files = sorted(path for path in folder.glob("*") if path.suffix in WEIGHTS or path.name == "config.json")
        for path in files:
            with path.open("rb") as content:
                digest.update(path.name.encode() + hashlib.file_digest(content, "sha256").digest())
        found |= {f"{role}.path": digest.hexdigest()} if files else {}
    return found


def run_of(claim: "Claim", words: Sequence[str]) -> "Run":
    """A run of what a claim says, or the finished one. Raises AbsentError if weights or data are missing."""
    if claim.needs:
        raise AbsentError(claim.needs)
    from specbench.config.compose import compose_as, fields
    from specbench.run.jobs import finished, job_of

    label = hashlib.sha256(claim.model_dump_json(exclude={"numbers", "rows"}).encode()).hexdigest()[:8]
    folder = Path("outputs/claim", fields("-".join([*claim.of.split(), *words, label])))
    config = compose_as(claim.choices, claimed(claim.settings), [*words, "logger=none", "name=claim"])
    job = job_of(config, folder, words)
    from specbench.config.build import chosen_prompts  # which loads torch
    from specbench.data.prompts import content_hash, load
    from specbench.report import terminal
    from specbench.run.evaluate import run_logged

    if claim.data is not None:  # before anything is decoded in vain
        found = content_hash(chosen_prompts(load(job.checked.choices["data"].build()), job.checked.root))
        if found != claim.data.sha256:
            raise AbsentError(f"data={job.checked.names['data']} are other prompts here, {found[:10]} and not "
                              f"{claim.data.sha256[:10]}: give the claim's own with data.path=FILE")  # fmt: skip
    run = finished(folder, job.checked.resolved) or run_logged(job, announce=print)
    terminal.summary(run.results, folder)
    return run


def check_claim(path: Path, words: Sequence[str]) -> bool:
    """Runs the claims of a file, prints the table of answers behind one sentence. Returns whether all that follows from
    models and prompts alone is consistent. Raises ConfigError."""
    import pandas as pd

    from specbench.measure.claim import Judged, judged, read_claim, shown, within
    from specbench.report import terminal

    claim = read_claim(path)
    rows, missing, fits = list[dict[str, Any]](), "", True
    for own in claim.each():
        try:
            run = run_of(own, words)
            found = judged(own, run.results, run.records, weights_of(run.results["config"]))
            fits &= all(each.answer != "inconsistent" or each.number == "speedup" for each in found)
        except AbsentError as error:
            missing, gamma = str(error), own.settings.get("gamma")
            found = within(own.numbers, gamma if isinstance(gamma, int) else None)
            but = {each.number for each in found}
            left = {name: number for name, number in own.numbers if number is not None and name not in but}
            found += [Judged(name, shown(number), "-", "cannot tell", "-") for name, number in left.items()]
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        rows += [({"row": own.of} if claim.rows else {}) | vars(each) for each in found]
    terminal.show(sentence(rows, missing), "bold")
    terminal.show(terminal.table(pd.DataFrame(rows)))
    terminal.show(f"claimed by {claim.source}", "dim")
    return fits


def sentence(rows: Sequence[Mapping[str, Any]], missing: str) -> str:
    """The answers in one sentence."""
    by = {answer: [row for row in rows if row["answer"] == answer] for answer in ("inconsistent", "consistent")}
    names = {answer: ", ".join(dict.fromkeys(row["number"] for row in own)) or "none" for answer, own in by.items()}
    counts = (
        f"{len(by['inconsistent'])} of {len(rows)} numbers are inconsistent ({names['inconsistent']}), "
        f"{len(by['consistent'])} consistent ({names['consistent']})"
    )
    return f"Cannot tell: {missing}. Of the claim's own numbers, beside each other, {counts}" if missing else counts
