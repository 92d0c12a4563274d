"""How decoders of transformers are called, whichever arguments they take. b rows, N new tokens, V vocabulary."""

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from specbench.cache.slots import cache_argument
from specbench.models.attention_mask import TokenPlaces

if TYPE_CHECKING:
    from specbench.models.positions import Positions


class CausalCall:
    """How a causal module is called; of those with an encoder or a recurrent state there are subclasses."""

    positions: "Positions | None" = None  # what gives its tokens their positions, if it takes none

    def __init__(self, stock: PreTrainedModel, module: Any):
        """`module` is the one that is called: `stock` as transformers made it, or what an executor made of it."""
        accepted = inspect.signature(stock.forward).parameters
        inner = inspect.signature(stock.get_decoder().forward).parameters
        self.cache_name = cache_argument(module.forward)
        self.skips_logits = "logits_to_keep" in accepted
        self.takes_positions = "position_ids" in accepted or ("kwargs" in accepted and "position_ids" in inner)
        # RoBERTa and its kin count a text's positions from the one behind their padding's.
        parts: Iterable[Any] = stock.modules()
        padded = (part for part in parts if hasattr(part, "create_position_ids_from_input_ids"))
        self.first = next((int(part.padding_idx) + 1 for part in padded), 0)
        # The attention functions of transformers take any strides; attention that a model writes itself may not.
        self.contiguous = not (isinstance(stock, PreTrainedModel) and stock.is_backend_compatible())
        if not self.takes_positions:
            from specbench.models.positions import Positions

            self.positions = Positions(module.get_decoder())

    def logits(
        self, model: Any, words: dict[str, Tensor], places: TokenPlaces, row: int | None, keep_logits: int
    ) -> Tensor:
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of new tokens, `words` being their ids or embeddings,
        as the module of a `CachedModel` computes them. `row` is the only row of the forward, None for the first b."""
        given: dict[str, Any] = {"attention_mask": model.mask(places), self.cache_name: model.cache}
        if self.takes_positions:
            given["position_ids"] = places.positions + self.first
        if self.skips_logits:
            given["logits_to_keep"] = keep_logits
        with nullcontext() if self.positions is None else self.positions.at(places):
            found: Tensor = model.module(**words, **given, use_cache=True).logits
        return found
