"""What is tried once with every loaded model: that the adapter's logits on ragged rows, chains and trees are those of
the stock module on each text alone. T tokens, V vocabulary."""

import math
from collections import abc
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.sequence import Sequence
from specbench.decoding.token_tree import static_tree
from specbench.errors import ConfigError, first_line
from specbench.models.encoder_decoder import encoder_words
from specbench.models.language_model import LanguageModel

TEXT = 8  # tokens, within the shortest context that decodes anything
STARTS = (1, 2)  # where each of two rows goes on
PARENT, PATHS = (0, 0, 1, 1, 2), ((0, 2, 5), (0, 1, 3), (0, 1, 4))  # a tree, and nodes on its paths
CHAIN = tuple(range(len(PARENT) + 1))
PLACED, PLACED_16_BIT = 1e-3, 0.1  # of the largest logit: what rounding may explain


@torch.inference_mode()
def reads_trees(model: LanguageModel, key: str) -> bool:
    """Whether trees behind two rows of unequal lengths have the logits that their paths have in the module as
    transformers calls it. Raises ConfigError if chains have not. `model` has static caches, and runs eagerly."""
    try:
        try:
            text, stock = _read_rows(model)
            reason = _difference(model, text, stock, None, [CHAIN])
        except Exception as error:  # of a module that is called as it was not meant to be
            reason = first_line(error)
        if reason is not None:
            raise ConfigError(
                f"{key} is a {type(model.module).__name__}, whose decoder does not follow the positions and masks "
                f"that it is given ({reason}): give another model"
            )
        if model.recurrence is not None:
            return False
        with suppress(Exception):
            return _difference(model, text, stock, PARENT, PATHS) is None
        return False
    finally:
        model.free()


def _read_rows(model: LanguageModel) -> tuple[Tensor, list[Tensor]]:
    """The tokens [1, entries] behind two rows that the model has read; and by row the stock module's logits [paths,
    entries, V] of the chain and of each path of the tree. Short paths go on there: it is causal."""
    unplaced = None if model.encoder is None else model.encoder.positions.no_position
    ids = [token % model.own_vocab_size for token in range(2, 3 + TEXT) if token != unplaced][:TEXT]
    text = torch.tensor([ids], device=model.device)
    model.allocate(len(STARTS), TEXT)
    paths = [CHAIN, *((*path, *CHAIN[len(path) :]) for path in PATHS)]
    stock = []
    for row, (start, read) in enumerate(zip(STARTS, (ids[:3], ids[2:]), strict=True)):
        model.encode(row, Sequence([], 0, 0, read))
        model.read_row(text, row, 0, start)
        alone = torch.tensor([[*ids[:start], *(ids[entry] for entry in path)] for path in paths], device=model.device)
        stock.append(plain_logits(model.module, alone, read)[:, start:])
    model.cache.reserve([TEXT] * len(STARTS))
    return text[:, : len(CHAIN)], stock


def _difference(
    model: LanguageModel, text: Tensor, stock: list[Tensor], parents: tuple[int, ...] | None,
    paths: abc.Sequence[abc.Sequence[int]],
) -> str | None:  # fmt: skip
    """How logits along the paths of a tree (None: a chain) differ from the stock module's; None if by rounding."""
    first = torch.tensor(STARTS, device=model.device)
    tree = None if parents is None else static_tree(parents, model.device)
    found = model.forward(text.expand(len(STARTS), -1), first, TEXT, tree=tree).float()  # [2, entries, V]
    errors = []
    for row, logits in enumerate(stock):
        own = logits[:1] if parents is None else logits[1:, : len(paths[0])]
        ours = found[row, torch.tensor(paths, device=model.device), : own.shape[-1]]
        distance = torch.where(ours.isfinite(), (ours - own).abs(), 0 if model.encoder else torch.inf)
        errors.append((distance.amax(-1) / own.abs().max()).flatten())
    # In 16 bits rounding may turn a single token to other experts, which changes its logits and no others' before it.
    exact, by_row = model.dtype == torch.float32, torch.stack(errors)
    worst = float((by_row.amax(1) if exact else by_row.median(1).values).max())
    if math.isnan(worst):
        return "logits that are all 0, or not finite"
    return None if worst <= (PLACED if exact else PLACED_16_BIT) else f"logits differ by {worst:.1g}"


def plain_logits(module: Any, texts: Tensor, read: abc.Sequence[int]) -> Tensor:
    """Logits [n, T, V] of texts [n, T], each after an encoder's input if there is an encoder, without a cache, as
    transformers computes them."""
    words = {"input_ids": texts}
    if module.config.is_encoder_decoder:
        words = encoder_words(module, read, len(texts)) | {"decoder_input_ids": texts}
    found: Tensor = module(**words, use_cache=False).logits.float()
    return found
