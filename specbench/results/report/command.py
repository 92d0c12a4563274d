"""`python -m specbench.report outputs/NAME`: one HTML page, and its figures as PNG and SVG."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from specbench.errors import ConfigError, answering, visible


def main(arguments: list[str] | None = None) -> None:
    """Writes the report of a run or of many; a mistake of the user's becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="specbench.report", description=__doc__)
    about = "a run's folder, a sweep's or a comparison's"
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help=about)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the page goes; needed for several folders")
    parser.add_argument("--wandb-report", metavar="ENTITY/PROJECT", help="also create a W&B report there")
    args = parser.parse_args(arguments)
    with answering():
        write_pages(args.folders, args.out, args.wandb_report)


def write_pages(folders: Sequence[Path], out: Path | None, wandb: str | None) -> None:
    """Writes the page of all runs in these folders, and of many each one's own where it is missing or older than the
    results. Raises ConfigError."""
    if len(folders) > 1 and out is None:
        raise ConfigError("a page of several folders needs a folder of its own: give --out DIR")
    if absent := [folder for folder in folders if not folder.is_dir()]:
        raise ConfigError(f"{absent[0]} is no folder: give folders of finished runs")
    from specbench.contrib.wandb_report.report import save_report
    from specbench.results.atomic_files import writing
    from specbench.results.reader import load_runs
    from specbench.results.report.page import write_report

    runs, folder = load_runs(*folders), out or folders[0]
    with writing(folder):
        missing = [run for run in runs if run.folder.resolve() != folder.resolve() and lacks_page(run.folder)]
        for number, run in enumerate(missing, 1):
            print(visible(f"{number} of {len(missing)}: {write_report(run.folder, [run])}"), flush=True)
        page = write_report(folder, runs)
    drawn = folder / "figures"
    print(visible(f"{page} and {len(list(drawn.glob('*.png')))} figures in {drawn}"))
    if wandb:
        print(visible(save_report(wandb, runs)))


def lacks_page(folder: Path) -> bool:
    """Whether a run's page is missing, or older than its results."""
    from specbench.results.report.html_page import PAGE

    page, results = folder / PAGE, folder / "results.json"
    return not page.is_file() or page.stat().st_mtime < results.stat().st_mtime
