"""`python -m specbench.report outputs/NAME`: one HTML page, and its figures as PNG and SVG."""

import argparse
from pathlib import Path

from specbench.settings import ConfigError, stop
from specbench.visible import visible


def main(arguments: list[str] | None = None) -> None:
    """Writes the report of a run or multirun; a mistake of the user's becomes one sentence and exit code 2."""
    parser = argparse.ArgumentParser(prog="specbench.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="a run's folder, or a multirun's")
    parser.add_argument("--wandb-report", metavar="ENTITY/PROJECT", help="also create a W&B report there")
    args = parser.parse_args(arguments)
    from specbench.report.page import write_report
    from specbench.storage.atomic import writing
    from specbench.storage.read import load_runs

    try:
        runs = load_runs(args.folder)
        with writing(args.folder):
            page = write_report(args.folder, runs)
        drawn = args.folder / "figures"
        print(visible(f"{page} and {len(list(drawn.glob('*.png')))} figures in {drawn}"))
        if args.wandb_report:
            from specbench.report.wandb_report import save_report

            print(visible(save_report(args.wandb_report, runs)))
    except ConfigError as error:
        stop(str(error), 2)


if __name__ == "__main__":
    main()
