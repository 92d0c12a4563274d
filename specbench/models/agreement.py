"""What is tried once with every loaded model: that the adapter's logits on ragged rows, chains and trees are those of
the stock module on each text alone. T tokens, V vocabulary."""

import logging
import math
from collections import abc
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.sequence import Sequence
from specbench.decoding.token_tree import static_tree
from specbench.errors import ConfigError, first_line
from specbench.models.language_model import LanguageModel

log = logging.getLogger(__name__)
TEXT = 8  # tokens, within the shortest context that decodes anything
STARTS = (1, 2)  # where each of two rows goes on
PARENT, PATHS = (0, 0, 1, 1, 2), ((0, 2, 5), (0, 1, 3), (0, 1, 4))  # a tree, and nodes on its paths
CHAIN = tuple(range(len(PARENT) + 1))
# Of the largest logit: far above what two texts in one forward differ by through rounding, below what a module that is
# slightly not causal does, as UMT5 was.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of 16 bits two steps
PLACED, PLACED_16_BIT = 1e-3, 0.1  # of the largest logit: what rounding may explain


@torch.inference_mode()
def reads_trees(model: LanguageModel, key: str) -> bool:
    """Whether trees behind two rows of unequal lengths have the logits that their paths have in the module as
    transformers calls it. Triton kernels with which chains have not are given up. Raises ConfigError if chains have not
    without it, or if the module is not causal."""
    reason, trees = _tried(model, key)
    if model.fused is not None and (reason := reason or model.fused.difference(model)) is not None:
        log.warning("%s runs without the kernels of layers, which takes longer: %s", model.name, reason)
        model.fused = None
        reason, trees = _tried(model, key)
    if reason is not None and model.kernel:
        from specbench.models.kernel_attention import kept

        model.kernel = kept(model.attention, model.name, reason)
        reason, trees = _tried(model, key)
    if reason is not None:
        raise ConfigError(
            f"{key} is a {type(model.module).__name__}, whose decoder does not follow the positions and masks that it "
            f"is given ({reason}): give another model"
        )
    return trees


def _tried(model: LanguageModel, key: str) -> tuple[str | None, bool]:
    """Why chains are not read as the stock module reads them, or None; and whether trees are."""
    trees = False
    try:
        text, stock = _read_rows(model, key)
        reason = _difference(model, text, stock, None, [CHAIN])
        if reason is None and model.recurrence is None:
            with suppress(Exception):
                trees = _difference(model, text, stock, PARENT, PATHS) is None
    except ConfigError:
        raise
    except Exception as error:  # of a module that is called as it was not meant to be
        reason = first_line(error)
    finally:
        model.free()
    return reason, trees


def _read_rows(model: LanguageModel, key: str) -> tuple[Tensor, list[Tensor]]:
    """The tokens [1, entries] behind two rows that the model has read; and by row the stock module's logits [paths,
    entries, V] of the chain and of each path of the tree. Short paths go on there: it is causal. Raises ConfigError if
    it is not."""
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
        logits = plain_logits(model.stock, alone, read)  # [paths, T, V]
        before = logits[[0, 2], : start + 2]  # of tokens that these two paths share
        if logits.shape[-1] != model.own_vocab_size:
            raise ValueError(f"logits of {logits.shape[-1]} tokens, but vocab_size={model.own_vocab_size}")
        if float((before[0] - before[1]).abs().max()) > ROUNDING[model.dtype] * float(before.abs().max()):
            raise ConfigError(f"{key} is not causal: its logits at a token change with later tokens, use another model")
        stock.append(logits[:, start:])
    return text[:, : len(CHAIN)], stock


def _difference(
    model: LanguageModel, text: Tensor, stock: list[Tensor], parents: tuple[int, ...] | None,
    paths: abc.Sequence[abc.Sequence[int]],
) -> str | None:  # fmt: skip
    """How logits along the paths of a tree (None: a chain) differ from the stock module's; None if by rounding."""
    first = torch.tensor(STARTS, device=model.device)
    tree = None if parents is None else static_tree(parents, model.device)
    visible = model.rollback_to(STARTS, len(CHAIN))
    tokens = text.expand(len(STARTS), -1)
    found = model.forward(tokens, first, visible, tree=tree, suppressing=False).float()  # [2, entries, V]
    errors, shared = [], min(model.own_vocab_size, model.vocab_size)
    for row, logits in enumerate(stock):
        own = logits[:1] if parents is None else logits[1:, : len(paths[0])]
        ours = found[row, torch.tensor(paths, device=model.device)]
        errors.append(((ours[..., :shared] - own[..., :shared]).abs().amax(-1) / own.abs().max()).flatten())
    # In 16 bits rounding may turn a single token to other experts, which changes its logits and no others' before it.
    by_row = torch.stack(errors)
    worst = float((by_row.amax(1) if model.dtype == torch.float32 else by_row.median(1).values).max())
    if math.isnan(worst):
        return "logits that are all 0, or not finite"
    return None if worst <= allowed(model) else f"logits differ by {worst:.1g}"


def allowed(model: LanguageModel) -> float:
    """The share of the largest logit that rounding may explain."""
    return PLACED if model.dtype == torch.float32 else PLACED_16_BIT


def plain_logits(module: Any, texts: Tensor, read: abc.Sequence[int]) -> Tensor:
    """Logits [n, T, V] of texts [n, T], each after an encoder's input if there is an encoder, without a cache, as
    transformers computes them."""
    if module.config.is_encoder_decoder:
        from specbench.models import encoder_decoder

        return encoder_decoder.plain_logits(module, texts, read).float()
    found: Tensor = module(input_ids=texts, use_cache=False).logits.float()
    return found
