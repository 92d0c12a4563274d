"""Could a policy foresee beta? How betas spread within and between the prompts of a finished run.

python -m specbench temperature=0
python experiments/adaptive_gamma/spread.py outputs/run/temperature=0
"""

import argparse
from pathlib import Path

import pandas as pd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    betas = pd.read_parquet(parser.parse_args().run / "positions.parquet").dropna(subset="beta")
    prompts = betas.groupby("prompt")["beta"]
    apart = betas["beta"] - prompts.transform("mean")
    print(f"{len(betas):,} positions of {prompts.ngroups} prompts, mean beta {betas['beta'].mean():.3f}")
    print(f"standard deviation within a prompt {apart.std():.2f}, of the prompts' means {prompts.mean().std():.2f}")
    print(f"correlation with the next token's beta {apart.corr(apart.groupby(betas['prompt']).shift(-1)):.2f}")
    tenth = pd.qcut(betas["confidence"], 10, duplicates="drop")
    by_confidence = betas.groupby(tenth, observed=True)["beta"].mean()
    print(f"mean beta by largest probability of q: lowest tenth {by_confidence.iloc[0]:.2f}, "
          f"highest {by_confidence.iloc[-1]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
