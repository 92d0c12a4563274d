"""Rows of tokens to train on: a text cut into pieces of equal length. n rows of T tokens."""

from typing import Any

import torch
from torch import Tensor

from specbench.data.files import read_text
from specbench.data.stdlib_corpus import read_modules
from specbench.errors import ConfigError

HELD_OUT_ROWS = 64
HELD_OUT_SHARE = 0.1  # of a text file


def training_rows(path: str | None, tokenizer: Any, row: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows [n, row] of training text and of held-out text: nine tenths of a file and its last tenth or, without a
    path, the modules of the standard library that the shipped pair was trained on and those that were held out."""
    if path is None:
        training = list(read_modules(held_out=False).values())
        held_out = list(read_modules(held_out=True).values())
    else:
        text = read_text(path, "text")
        cut = round(len(text) * (1 - HELD_OUT_SHARE))
        training, held_out = [text[:cut]], [text[cut:]]
    return text_rows(training, tokenizer, row, tokens, seed), text_rows(held_out, tokenizer, row, HELD_OUT_ROWS * row)


def text_rows(texts: list[str], tokenizer: Any, row: int, tokens: int, seed: int | None = None) -> Tensor:
    """All texts one after another, each with the end-of-text token, cut into rows [n, row]; at most `tokens` tokens in
    all, from random places if there is a seed. Raises ConfigError if the text is shorter than one row."""
    end = tokenizer.eos_token_id
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ending = [] if end is None else [end]
    stream = torch.tensor([token for text in ids for token in (*text, *ending)])
    if len(stream) < row:
        raise ConfigError(f"row={row} is not possible: a text has only {len(stream)} tokens")
    rows = stream[: len(stream) // row * row].view(-1, row)
    if seed is not None:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    return rows[: max(1, tokens // row)]
