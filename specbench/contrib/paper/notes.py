"""Numbers that other texts on speculative decoding print, in tables of their own, each beside what a formula gives.

`ngram_chapter` is the chapter "Speculative Decoding with N-grams" of the book on the inference engine akunu;
`runner_design` is the design "Phase 11: Speculative Decoding" of an inference engine, for Llama-3.2 1B and 3B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import yaml

from specbench import theory
from specbench.config.memory import Budget
from specbench.config.paths import conf_dir
from specbench.contrib.paper.published import AKUNU_CHAPTER, mean_accepted
from specbench.models.load import PretrainedModel, footprint
from specbench.models.sizes import ModelSize
from specbench.stats.position_stats import CHUNK

Row = dict[str, str]
DRAFTS = 4  # guesses of a round in the chapter
BANDS = [  # alpha as printed and its ends; content as printed; our categories that are such content
    ("> 0.8", 0.8, 1.0, "repetitive code, templates, JSON and XML, code that mirrors the prompt", "code, lists"),
    ("0.4-0.7", 0.4, 0.7, "natural language, code with novel logic, structured output", "code, prose, lists"),
    ("< 0.3", 0.0, 0.3, "novel text, proofs, first generation of a pattern, conversation", "dialogue"),
]
K, ROWS, COLUMNS = 5, 8, 4096  # of the design: guesses of a round, sequences, tokens of each
CHEAPER = 3  # times that a forward of 1B is cheaper than one of 3B, as printed
READINGS = [  # an acceptance rate as printed, and what is said of it
    (0.5, "below it, a smaller K"), (0.7, "typical, 1.5 to 2.5x"), (0.9, "typical, 1.5 to 2.5x; above it, a larger K"),
]  # fmt: skip
PREFILL_CHUNK = 512  # of conf/config.yaml
MODELS = {"1B": "drafter/llama1b", "3B": "target/llama3b"}
UNITS = {"GB": (1e9, 2.0**30), "MB": (1e6, 2.0**20), "B": (1.0, 1.0)}  # decimal and binary


@dataclass(frozen=True)
class Note:
    """Who prints the numbers, and tables of them by caption."""

    source: str
    tables: Callable[[], dict[str, Sequence[Row]]]


def alpha_for(share: float, gamma: int) -> float:
    """The alpha at which equation 1 expects share * gamma accepted guesses, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_accepted(middle, gamma) < share * gamma else (low, middle)
    return low


def ngram_tables() -> dict[str, Sequence[Row]]:
    """Alpha by kind of content, and the accepted guesses that equation 1 gives for it."""
    rows = [
        {"content": content, "our categories": ours, "alpha, printed": printed,
         f"accepted of {DRAFTS}, equation 1": f"{mean_accepted(low, DRAFTS):.2f} to {mean_accepted(high, DRAFTS):.2f}"}
        for printed, low, high, content, ours in BANDS
    ]  # fmt: skip
    return {"Alpha by content (no source is given for it), and the accepted guesses that follow": rows}


def design_tables() -> dict[str, Sequence[Row]]:
    """Two readings of the printed acceptance rates, and the printed memory beside our estimate."""
    return {
        f"Acceptance rates, for K = {K} and Theorem 3.8 at c = 1/{CHEAPER}": [
            row for rate, said in READINGS for row in _readings(rate, said)
        ],
        f"Memory, for {ROWS} sequences of {COLUMNS:,} tokens in bfloat16": memory_rows(),
    }


def _readings(rate: float, said: str) -> list[Row]:
    rows = []
    for reading, alpha in (("mean of accepted / K", alpha_for(rate, K)), ("alpha", rate)):
        tokens = theory.expected_tokens(alpha, K)
        rows.append({
            "rate": f"{rate:.2f}", "printed of it": said, "read as": reading, "alpha": f"{alpha:.3f}",
            "accepted / K": f"{(tokens - 1) / K:.3f}", "tokens a call": f"{tokens:.2f}",
            "speedup": f"{theory.walltime_improvement(alpha, K, 1 / CHEAPER):.2f}x",
        })  # fmt: skip
    return rows


def footprints() -> dict[str, ModelSize]:
    """The two models in bfloat16, from the shapes in conf/."""
    found = {}
    for name, place in MODELS.items():
        written = yaml.safe_load((conf_dir() / f"{place}.yaml").read_text(encoding="utf-8"))
        settings = PretrainedModel.Settings(
            path=written["path"], revision=None, weights="random", chat_template="never", shape=written["shape"]
        )
        found[name] = footprint(settings, place.partition("/")[0], torch.bfloat16)
    return found


def memory_rows() -> list[Row]:
    """The design's table of memory, each line beside ours."""
    small, large = (footprints()[name] for name in ("1B", "3B"))
    ours = Budget.of(
        [large, small], rows=ROWS, columns=COLUMNS, held=ROWS * COLUMNS, tokens=K + 1, prefill_chunk=PREFILL_CHUNK,
        read_again=CHUNK, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    kv = {name: COLUMNS * model.column for name, model in (("1B", small), ("3B", large))}
    lines = [
        ("weights of 3B", "6.5 GB", large.weights),
        ("weights of 1B", "2.5 GB", small.weights),
        ("keys and values of a token, 3B", "114688 B", large.column),
        ("keys and values of a token, 1B", "32768 B", small.column),
        ("keys and values of a sequence, 3B", "448 MB", kv["3B"]),
        ("keys and values of a sequence, 1B", "128 MB", kv["1B"]),
        ("keys and values of 3B", "3.5 GB", ROWS * kv["3B"]),
        ("keys and values of 1B", "1.0 GB", ROWS * kv["1B"]),
        ("activations and temporaries", "1.5 GB", ours.activations),
        ("total", "15.0 GB", ours.weights + ours.kv + ours.activations),
    ]
    return [{"what": what, "printed": f"~{printed}", **_beside(printed, count)} for what, printed, count in lines]


def _beside(printed: str, count: int) -> Row:
    """A count of bytes in the printed unit, decimal and binary, and which of the two rounds to the printed number."""
    number, unit = printed.split()
    decimals = len(number.partition(".")[2])
    values = dict(zip(("decimal", "binary"), (count / size for size in UNITS[unit]), strict=True))
    fits = [name for name, value in values.items() if f"{value:.{decimals}f}" == number]
    judged = "agrees" if len(fits) == 2 else f"agrees in {fits[0]} units" if fits else "differs"
    shown = {f"ours, {name} units": f"{value:.{decimals + (unit != 'B')}f}" for name, value in values.items()}
    return shown | {"": judged}


NOTES: dict[str, Note] = {
    "ngram_chapter": Note(AKUNU_CHAPTER, ngram_tables),
    "runner_design": Note(
        'the design "Phase 11: Speculative Decoding" of an inference engine, for Llama-3.2 1B and 3B', design_tables
    ),
}
