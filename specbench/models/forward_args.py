"""How a causal module without an encoder is called, with positions for each row.

Most modules of transformers take positions. The others have an embedding of positions (BART's decoder alone), ALiBi or
local attention, which are given those of the forward. b rows, N new tokens, T columns, V vocabulary.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specbench.decoding.executor import Executor
from specbench.decoding.token_tree import Tree
from specbench.models.positions import COUNTED, Positions


class Decoder:
    """What a module's `forward` is given."""

    def __init__(self, stock: PreTrainedModel, module: Any, places: bool = True):
        """`module` is the one that is called: `stock` as transformers made it, or what an executor made of it. Without
        `places` it has no positions but those of its arguments."""
        accepted = inspect.signature(stock.forward).parameters
        inner = inspect.signature(_decoder_of(stock).forward).parameters
        self.skips_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted or ("kwargs" in accepted and "position_ids" in inner)
        decoder = _decoder_of(module)
        self.first = _first_position(stock)
        # The attention functions of transformers take any strides; attention that a model writes itself may not.
        self.contiguous = not (isinstance(stock, PreTrainedModel) and stock.is_backend_compatible())
        counted = Positions(decoder, COUNTED)
        self.counts_positions = bool(counted.patches)
        given = None if self.takes_positions or not places else Positions(decoder)
        self.patched = counted if self.counts_positions else given

    def obstacle(self, executor: Executor) -> str | None:
        """Why an executor cannot run the module: what it has traced does not change with positions that are not
        arguments."""
        possible = executor.runs_encoders and not (executor.compiles and self.counts_positions)
        if self.patched is not None and not possible:
            return "its positions are no arguments of its forward: choose executor=auto or eager"
        return None

    def logits(
        self, module: Any, words: dict[str, Tensor], positions: Tensor, root: Tensor, visible: int, tree: Tree | None,
        keep_logits: int, seen: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of new tokens at positions [b, N], `words` being
        their ids or embeddings, as the module computes them. `seen` is the cache and what says which of its `visible`
        columns they see; root [b] is the column of entry 0 of their tree."""
        options: dict[str, Any] = {"position_ids": positions + self.first} if self.takes_positions else {}
        if self.skips_logits:
            options["logits_to_keep"] = keep_logits
        with self._at(positions, root, visible, tree):
            found: Tensor = module(**words, **options, **seen, use_cache=True).logits
        return found

    def _at(self, positions: Tensor, root: Tensor, visible: int, tree: Tree | None) -> AbstractContextManager[None]:
        return nullcontext() if self.patched is None else self.patched.at(positions, root, visible, tree)


def _first_position(module: PreTrainedModel) -> int:
    """The position of a text's first token: RoBERTa and its kin count from the one after their padding's."""
    found = (part for part in module.modules() if hasattr(part, "create_position_ids_from_input_ids"))
    return next((int(part.padding_idx) + 1 for part in found), 0)  # type: ignore[arg-type]


def _decoder_of(module: Any) -> Any:
    """The part of a module that reads tokens, or the module itself."""
    return module.get_decoder() if hasattr(module, "get_decoder") else module
