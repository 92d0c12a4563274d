"""A plain forward pass of the stock module: the second source of p, which shares no cache, mask or executor of ours.

With every loaded model it is tried once whether the adapter's logits on ragged rows, chains and trees are those of the
stock module on each text alone. T tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import EncoderInput
from specbench.decoding.sequence import Sequence as TextSequence
from specbench.decoding.token_tree import static_tree
from specbench.errors import ConfigError, first_line
from specbench.models.generation import never_drawn
from specbench.models.language_model import LanguageModel
from specbench.models.sizes import HALVES

LONGEST_EAGER = 4096  # tokens of a text that eager attention reads, which holds their square: SDPA reads longer ones
TEXT = 8  # tokens, within the shortest context that decodes anything
STARTS = (1, 2)  # where each of two rows goes on
PARENT, PATHS = (0, 0, 1, 1, 2), ((0, 2, 5), (0, 1, 3), (0, 1, 4))  # a tree, and nodes on its paths
CHAIN = tuple(range(len(PARENT) + 1))
# Of the largest logit: far above what two texts in one forward differ by through rounding, below what a module that is
# slightly not causal does, as UMT5 was.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of 16 bits two steps
PLACED, PLACED_16_BIT = 1e-3, 0.1  # of the largest logit: what rounding may explain


@dataclass
class FinishedText:
    """New tokens `ids` after a prompt, and the stock modules' logits for them, so that each reads the text once."""

    prompt: Sequence[int]
    ids: Sequence[int]
    encoder_input: Sequence[int] | None = None
    known: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def scores(self, model: LanguageModel, sampling: Sampling | None = None, end: int | None = None) -> Tensor:
        """Logits [n, V] of the new tokens among the first `end` of the text, by the stock module of target or drafter,
        after the repetition penalty of `sampling`, by default the model's own."""
        begin, text = len(self.prompt), torch.tensor([[*self.prompt, *self.ids][:end]], device=model.device)
        key = (id(model), text.shape[1])
        if key not in self.known:
            read = self.encoder_input if model.encoder is not None else None
            self.known[key] = stock_logits(model, model.vocabulary.read(text), begin, read)
        return penalised(model.vocabulary.fit(self.known[key].float()), text, begin, sampling or model.sampling)


def penalised(logits: Tensor, text: Tensor, begin: int, sampling: Sampling) -> Tensor:
    """Logits [n, V] of the tokens from `begin` on of a text [1, T], after transformers' own repetition penalty."""
    if sampling.repetition_penalty == 1:
        return logits
    processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    return torch.cat([processor(text[:, : begin + i], logits[i : i + 1]) for i in range(len(logits))])


def stock_logits(
    model: LanguageModel, text: Tensor, begin: int, encoder_input: EncoderInput | None = None, suppressing: bool = True
) -> Tensor:
    """Logits [T - begin, V] that predict the tokens begin .. T - 1 of a text [1, T] after an encoder's input, if there
    is one, from one forward without a cache, with the masks and positions that transformers makes itself and its own
    attention. With `suppressing` tokens that generate() never draws are impossible."""
    module = model.stock
    if module.dtype in HALVES:
        from specbench.models.float_logits import with_float_logits

        module = with_float_logits(module)
    eager = text.shape[1] <= LONGEST_EAGER or not module._supports_sdpa
    before = module.config._attn_implementation
    module.set_attn_implementation("eager" if eager else "sdpa")
    try:
        kept = {"logits_to_keep": text.shape[1] - begin} if model.decoder.skips_logits else {}
        logits = plain_logits(module, text[:, :-1], encoder_input, **kept)[0, begin - text.shape[1] :]
    finally:
        module.set_attn_implementation(before)
    never = never_drawn(module) if suppressing else []
    return SuppressTokensLogitsProcessor(never, device=str(text.device))(text, logits) if never else logits


def plain_logits(module: Any, texts: Tensor, encoder_input: EncoderInput | None, **options: int) -> Tensor:
    """Logits [n, T, V] of texts [n, T] after an encoder's input, if any, by transformers without a cache."""
    if encoder_input is not None:
        from specbench.models import encoder_decoder

        return encoder_decoder.plain_logits(module, texts, encoder_input)
    found: Tensor = module(input_ids=texts, use_cache=False, **options).logits
    return found


@torch.inference_mode()
def reads_trees(model: LanguageModel, key: str) -> bool:
    """Whether trees behind two rows of unequal lengths have the logits that their paths have in the module as
    transformers calls it. Kernels of layers with which chains have not are given up. Raises ConfigError if chains have
    not without them, or if the module is not causal."""
    reason, trees = _tried(model, key)
    if model.fused is not None and (reason := reason or model.fused.difference(model)) is not None:
        model.without_kernels(reason)
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
        model.encode(row, TextSequence([], 0, 0, read))
        model.read_row(text, row, 0, start)
        alone = torch.tensor([[*ids[:start], *(ids[entry] for entry in path)] for path in paths], device=model.device)
        logits = plain_logits(model.stock, alone, None if model.encoder is None else read).float()  # [paths, T, V]
        before = logits[[0, 2], : start + 2]  # of tokens that these two paths share
        if logits.shape[-1] != model.own_vocab_size:
            raise ValueError(f"logits of {logits.shape[-1]} tokens, but vocab_size={model.own_vocab_size}")
        if float((before[0] - before[1]).abs().max()) > ROUNDING[model.dtype] * float(before.abs().max()):
            raise ConfigError(f"{key} is not causal: its logits at a token change with later tokens, use another model")
        stock.append(logits[:, start:])
    return text[:, : len(CHAIN)], stock


def _difference(
    model: LanguageModel, text: Tensor, stock: list[Tensor], parents: tuple[int, ...] | None,
    paths: Sequence[Sequence[int]],
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
    explained = PLACED if model.dtype == torch.float32 else PLACED_16_BIT
    return None if worst <= explained else f"logits differ by {worst:.1g}"
