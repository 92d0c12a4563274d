"""Trains a T5 that writes the first paragraph of a function's documentation string from its body, and a drafter.

    python experiments/train_docstrings/train.py --out FOLDER

A small counterpart of the paper's summarisation: long inputs, short outputs. The pairs are those of `data=docstrings`:
functions of Python's standard library, here of the modules that are not held out. The last 200 pairs, of the same
modules, are kept for perplexity and BLEU. An interrupted training goes on where its last checkpoint was. Needs
`pip install -e '.[train]'`.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encoder_decoders import Recipe, everything
from training import SEED, arguments

from specbench.contrib.paper.docstrings import pairs

RECIPE = Recipe(
    shapes={  # 0.69 M and 0.10 M parameters
        "target": dict(d_model=80, d_kv=20, num_heads=4, d_ff=192, num_layers=2, num_decoder_layers=4),
        "drafter": dict(d_model=32, d_kv=8, num_heads=4, d_ff=96, num_layers=1, num_decoder_layers=1),
    },
    rates={"target": 4e-3, "drafter": 8e-3},
    steps=(1000, 1000),
    vocabulary=2000,
    longest=(192, 40),
    words=1500,
)


def main() -> None:
    given = arguments(__doc__).parse_args()
    texts = [(pair.body, pair.summary) for pair in pairs(held_out=False)]
    random.Random(SEED).shuffle(texts)
    everything(RECIPE, texts, given.out)


if __name__ == "__main__":
    main()
