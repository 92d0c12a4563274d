"""Trains a T5 that translates English to German, and three drafters of about 1/3, 1/10 and 1/30 of its size.

    python experiments/train_ende/train.py --data FOLDER --out FOLDER

FOLDER of the data holds src-train.txt and tgt-train.txt, 10,000 aligned lines: the folder data/ of OpenNMT-py
(github.com/OpenNMT/OpenNMT-py, MIT license). An interrupted training goes on where its last checkpoint was. Needs
`pip install -e '.[train]'`.
"""

import html
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encoder_decoders import Recipe, Texts, everything
from training import arguments

RECIPE = Recipe(
    shapes={  # 1.30 M, 0.40 M, 0.12 M and 0.04 M parameters
        "target": dict(d_model=96, d_kv=24, num_heads=4, d_ff=256, num_layers=2, num_decoder_layers=6),
        "drafter_large": dict(d_model=64, d_kv=16, num_heads=4, d_ff=144, num_layers=2, num_decoder_layers=3),
        "drafter": dict(d_model=40, d_kv=10, num_heads=4, d_ff=96, num_layers=1, num_decoder_layers=1),
        "drafter_small": dict(d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1, num_decoder_layers=1),
    },
    rates={"target": 3e-3, "drafter_large": 4e-3, "drafter": 6e-3, "drafter_small": 1e-2},
    steps=(2600, 1800),
    words=1200,
    vocabulary=2000,
    longest=(96, 96),
)


def read(folder: Path) -> Texts:
    """The pairs of sentences, in both languages without the entities (&apos;) of the files."""
    source, target = ((folder / f"{side}-train.txt").read_text("utf-8").split("\n") for side in ("src", "tgt"))
    lines = zip(source, target, strict=True)
    return [(html.unescape(a.strip()), html.unescape(b.strip())) for a, b in lines if a.strip() and b.strip()]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="where src-train.txt and tgt-train.txt are")
    given = parser.parse_args()
    everything(RECIPE, read(given.data), given.out)


if __name__ == "__main__":
    main()
