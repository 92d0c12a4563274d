"""The encoder of an encoder-decoder, and how its decoder is called (the paper's T5, section 4).

A prompt is the encoder's input, which each model reads once: `read` fills the keys and values that cross-attention
needs, which are never rolled back. The decoder's text begins with start tokens, and everything else is as for a model
without an encoder. B rows, b of them in a forward, N new tokens, S tokens of the longest input, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from specbench.cache.slots import cache_argument
from specbench.errors import ConfigError
from specbench.models.attention_mask import TokenPlaces
from specbench.models.causal_call import CausalCall
from specbench.models.positions import Positions
from specbench.models.sizes import context_of


class InputLayer(NamedTuple):
    """What one layer's cross-attention reads, [b, heads, visible, head size]."""

    keys: Tensor
    values: Tensor


class EncoderInputs(Cache):
    """Keys and values of the encoder's outputs for each of `rows` rows, written once, when a request gets its row.
    A row without an input sees a single column, whose results nobody uses."""

    layers: list[Any]

    def __init__(self, rows: int, columns: Callable[[int], int], fixed_shapes: bool, device: torch.device):
        """`columns` rounds up a number of columns to store. With `fixed_shapes` all that are stored are read."""
        super().__init__(layers=[])
        self.rows, self.columns, self.fixed_shapes = rows, columns, fixed_shapes
        self.lengths = [1] * rows
        self.stored: list[Tensor] = []  # keys and values of each layer in turn, [B, heads, S, head size]
        self.seen = torch.zeros(rows, 0, dtype=torch.bool, device=device)  # [B, S]

    @property
    def visible(self) -> int:
        """The number of leading columns that a forward reads."""
        return self.seen.shape[1] if self.fixed_shapes else max(self.lengths)

    def clear(self) -> None:
        """Forgets the inputs of all rows; the tensors stay where they are."""
        for row in range(self.rows):
            self._set_length(row, 1)

    def write(self, row: int, layers: Sequence[InputLayer]) -> None:
        """Stores the keys and values [1, heads, s, head size] of every layer as the input of a row."""
        given = [new for layer in layers for new in layer]
        if not self.stored:
            self.stored = [new.new_zeros(self.rows, new.shape[1], 0, new.shape[3]) for new in given]
        length = given[0].shape[2]
        missing = self.columns(length) - self.seen.shape[1]
        if missing > 0:
            self.stored = [F.pad(stored, (0, 0, 0, missing)) for stored in self.stored]
            self.seen = F.pad(self.seen, (0, missing))
            self.seen[:, 0] = True
        for stored, new in zip(self.stored, given, strict=True):
            stored[row, :, :length] = new[0]
        self._set_length(row, length)

    def _set_length(self, row: int, length: int) -> None:
        self.lengths[row] = length
        self.seen[row] = False
        self.seen[row, :length] = True

    def place(self, count: int, row: int | None) -> Tensor:
        """Chooses a forward's rows: the first `count`, or only `row`. Returns the columns they see [b, visible]."""
        rows = slice(0, count) if row is None else slice(row, row + 1)
        read = [stored[rows, :, : self.visible] for stored in self.stored]
        self.layers = [InputLayer(*pair) for pair in zip(read[::2], read[1::2], strict=True)]
        return self.seen[rows, : self.visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible

    def bytes(self) -> int:
        """Bytes that keys and values occupy now."""
        return sum(stored.nbytes for stored in self.stored)

    def tensors(self) -> list[Tensor]:
        """Keys and values [B, heads, S, head size] by layer, and what is seen [B, S]; empty before the first input."""
        return [*self.stored, self.seen] if self.stored else []


class Encoder(CausalCall):
    """The encoder of a module, what its decoder's text begins with, and the rows' inputs."""

    inputs: EncoderInputs  # from `allocate` on

    def __init__(self, module: PreTrainedModel, name: str):
        """Raises ConfigError if the decoder's positions cannot be set, or its text has no start."""
        refuse_decoder(module, name)
        super().__init__(module, module)
        found: Any = module
        self.module, self.name = found, name
        self.encoder, self.decoder = found.get_encoder(), found.get_decoder()
        self.positions: Positions = Positions(self.decoder)
        self.start_tokens = start_of(module, name)
        self.context = context_of(module.config, "encoder")

    def shared(self) -> "Encoder":
        """An encoder of the same module with inputs of its own."""
        other = copy.copy(self)
        vars(other).pop("inputs", None)
        return other

    def allocate(self, rows: int, columns: Callable[[int], int], fixed_shapes: bool) -> None:
        """Makes room for inputs, and forgets those that were read. `columns` rounds up how many are stored."""
        inputs = vars(self).get("inputs")  # an executor that compiles after its warm-up fixes shapes then
        if inputs is None or inputs.rows != rows or not fixed_shapes or not inputs.fixed_shapes:
            self.inputs = inputs = EncoderInputs(rows, columns, fixed_shapes, self.module.device)
        inputs.clear()

    def read(self, row: int, given: Sequence[int]) -> None:
        """Runs the encoder on an input, and stores the keys and values of its outputs for a row. The decoder makes them
        when it reads its first token, which is done here with a cache of its own."""
        ids = torch.tensor([list(given)], device=self.module.device)
        states = self.encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        first = torch.tensor([self.start_tokens[:1]], device=self.module.device)
        made = EncoderDecoderCache(DynamicCache(), DynamicCache())
        kept = {cache_argument(self.decoder.forward): made}
        self.decoder(input_ids=first, encoder_hidden_states=states, use_cache=True, **kept)
        layers: Any = made.cross_attention_cache.layers
        self.inputs.write(row, [InputLayer(layer.keys, layer.values) for layer in layers])

    def logits(
        self, model: Any, words: dict[str, Tensor], places: TokenPlaces, row: int | None, keep_logits: int
    ) -> Tensor:
        """As `CausalCall.logits`; all are kept."""
        b, N = places.slots.shape
        module, mask = model.module, model.mask
        read = self.inputs.place(b, row)[:, None, None]  # [b, 1, 1, S]
        with self.positions.at(places):
            found: Tensor = module(
                **{f"decoder_{name}": value for name, value in words.items()},
                decoder_attention_mask=mask(places),
                encoder_outputs=BaseModelOutput(last_hidden_state=read),  # of which nothing is read any more
                attention_mask=mask.as_bias(read.expand(-1, -1, N, -1)),  # [b, 1, N, S]: LED and MVP broadcast nothing
                **{self.cache_name: EncoderDecoderCache(model.cache, self.inputs)},
                use_cache=True,
            ).logits
        return found


def plain_logits(module: Any, texts: Tensor, read: Sequence[int]) -> Tensor:
    """Logits [n, T, V] of texts [n, T] after an input, from one forward without a cache. Where padding has no position,
    transformers counts the tokens behind it otherwise than generate() does, unless they are read in a forward of their
    own: a single text is cut there."""
    ids = torch.tensor([list(read)], device=texts.device).expand(len(texts), -1)
    none = Positions(module.get_decoder()).no_position
    ends = [place + 1 for place, token in enumerate(texts[0].tolist()) if token == none]
    if not ends:
        found: Tensor = module(input_ids=ids, decoder_input_ids=texts, use_cache=False).logits
        return found
    kept = {cache_argument(module.forward): EncoderDecoderCache(DynamicCache(), DynamicCache())}
    states = module.get_encoder()(input_ids=ids)
    pieces = (piece for piece in texts.tensor_split(ends, 1) if piece.shape[1])
    return torch.cat(
        [module(decoder_input_ids=piece, encoder_outputs=states, use_cache=True, **kept).logits for piece in pieces], 1
    )


def refuse_decoder(module: Any, name: str) -> None:
    """Raises ConfigError if p depends on more than text and input, or if positions cannot be set by row."""
    config = module.config
    why = None
    if getattr(config, "expert_capacity", None) is not None:
        why = "expert_capacity in its config: which tokens an expert takes depends on the others of a forward"
    elif getattr(config, "attention_type", "original_full") != "original_full":
        why = "an attention_type in its config that changes with the input's length"
    elif not Positions(module.get_decoder()).known:
        why = "a decoder whose positions cannot be set for each row"
    if why is not None:
        raise ConfigError(
            f"{name} has {why}, give another encoder-decoder, such as t5, bart, pegasus, marian or m2m_100"
        )


def start_of(module: Any, name: str) -> list[int]:
    """The start token, and the token that generate() forces after it. Raises ConfigError."""
    options = module.generation_config
    start = options.decoder_start_token_id
    start = options.bos_token_id if start is None else start
    forced = options.forced_bos_token_id
    found = [start] if forced is None else [start, forced]
    if not all(isinstance(token, int) and 0 <= token < module.config.vocab_size for token in found):
        raise ConfigError(f"{name} has decoder_start_token_id={start} and forced_bos_token_id={forced}: no token ids")
    return found
