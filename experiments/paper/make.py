"""The paper's tables and figures: printed numbers, what the formulas give, and ours.

python -m specbench experiment=paper logger=none
python experiments/paper/make.py outputs/paper
"""

import argparse
import sys
from pathlib import Path

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import measured, write_header, write_rows

from specbench.contrib.paper.measured import OURS, our_rows
from specbench.contrib.paper.page import write
from specbench.errors import ConfigError
from specbench.results.reader import load_runs

HERE = Path(__file__).resolve().parent
EXPERIMENT = HERE.parents[1] / "conf" / "experiment" / "paper.yaml"


def main() -> None:
    """Writes NAME.md, NAME.png and NAME.csv of each table and figure, and the README's header."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the sweep, outputs/paper")
    args = parser.parse_args()
    callback = OmegaConf.load(EXPERIMENT).hydra.callbacks.paper
    every = []
    for name in sorted([*callback.names, *callback.others], key=[*OURS].index):
        try:
            runs = load_runs(args.folder / callback.others.get(name, "."))
        except ConfigError as error:
            print(f"{name} is left out: {error}")
            continue
        write(name, runs, HERE)
        write_rows(HERE / f"{name}.csv", our_rows(name, runs))
        every += [run.result for run in runs]
    if not every:
        parser.error(f"{args.folder} has no finished runs")
    write_header(HERE / "README.md", measured([], every))


if __name__ == "__main__":
    main()
