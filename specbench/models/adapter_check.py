"""What is checked once of every loaded model: that ragged rows and trees have the logits of its stock module.
transformers adds architectures with every release: one that the adapter does not call rightly is refused here."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.decoding.state import Job
from specbench.decoding.token_tree import Tree, static_tree
from specbench.errors import ConfigError, IncompleteError, first_line
from specbench.models.architecture import family_of
from specbench.models.encoder_decoder import encoder_words
from specbench.models.language_model import LanguageModel

TEXT = 8  # tokens, within the shortest context that decodes anything
PARENT, PATHS = (-1, -1, 0, 0, 1), ((0, 2, 5), (0, 1, 3), (0, 1, 4))  # a tree, and entries on its paths
CHAIN = (tuple(range(len(PARENT) + 1)),)
STARTS = (1, 2)  # where each of two rows goes on
PLACED, PLACED_16_BIT = 1e-3, 0.1  # of the largest logit: what rounding may explain


@torch.inference_mode()
def reads_trees(model: LanguageModel, key: str) -> bool:
    """Whether trees behind two rows of unequal lengths have the logits that their paths have in the module as
    transformers calls it. Raises ConfigError if chains have not. `model` has static caches, and runs eagerly."""
    reason = _difference(model, None, CHAIN)
    if reason is not None:
        kind = "encoder-decoder" if model.encoder else "model"
        raise ConfigError(
            f"{key} is a {type(model.module).__name__}, whose decoder does not follow the positions and masks that it "
            f"is given ({reason}): give another {kind}"
        )
    return model.recurrence is None and _difference(model, static_tree(PARENT, model.device), PATHS) is None


def _difference(model: LanguageModel, tree: Tree | None, paths: Sequence[Sequence[int]]) -> str | None:
    """How logits on these paths differ from the stock module's, or why there are none; None if by rounding."""
    try:
        errors = _errors(model, tree, paths)
    except IncompleteError:
        raise
    except Exception as error:  # of a module that is called as it was not meant to be
        return first_line(error)
    finally:
        model.free()
        model.encoder = None if model.encoder is None else model.encoder.shared()
    # In 16 bits rounding may turn a single token to other experts, which changes its logits and no others' before it.
    exact = model.dtype == torch.float32
    worst = float((errors.amax(1) if exact else errors.median(1).values).max())
    return None if worst <= (PLACED if exact else PLACED_16_BIT) else f"logits differ by {worst:.1g}"


def _errors(model: LanguageModel, tree: Tree | None, paths: Sequence[Sequence[int]]) -> Tensor:
    """[2, entries]: distances from the stock module's logits, as shares of the largest, for two rows and all paths."""
    unplaced = None if model.encoder is None else model.encoder.positions.no_position
    ids = [token % model.own_vocab_size for token in range(2, 3 + TEXT) if token != unplaced][:TEXT]
    text = torch.tensor([ids], device=model.device)
    probe = family_of(model.module.config).probe
    inputs = [probe(model.config, number, tokens) for number, tokens in enumerate((ids[:3], ids[2:]))]  # of an encoder
    model.allocate(len(STARTS), TEXT)
    for row, start in enumerate(STARTS):
        model.encode(row, Job([], 0, 0, inputs[row]))
        model.read_row(text, row, 0, start)
    first = torch.tensor(STARTS, device=model.device)
    model.cache.reserve([TEXT] * len(STARTS))
    found = model.forward(text[:, : len(PARENT) + 1].expand(2, -1), first, TEXT, tree=tree).float()  # [2, entries, V]
    errors = []
    for row, start in enumerate(STARTS):
        alone = torch.tensor([[*ids[:start], *(ids[entry] for entry in path)] for path in paths], device=model.device)
        words = {"input_ids": alone}
        if model.encoder is not None:  # tokens that generate() never draws have finite logits here
            words = encoder_words(model.module, inputs[row], len(alone)) | {"decoder_input_ids": alone}
        stock = model.module(**words, use_cache=False).logits[:, start:].float()  # [paths, entries, V]
        ours = found[row, torch.tensor(paths, device=model.device), : stock.shape[-1]]
        distance = torch.where(ours.isfinite(), (ours - stock).abs(), 0 if model.encoder else torch.inf)
        errors.append((distance.amax(-1) / stock.abs().max()).flatten())
    return torch.cat(errors).view(len(STARTS), -1)
