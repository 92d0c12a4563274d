"""What a model's configuration says before it loads: its size, and what its architecture needs beside the rest.

An architecture that needs more than causal decoders and encoder-decoders of text have in common has a `Family`: a
class that is named in DECODERS, and imported when a model of it is used. B rows, b of them in a
forward, N new tokens, V vocabulary.
"""

import copy
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import hydra
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specbench.cache.slots import SlotCache
from specbench.component import Selections
from specbench.decoding.state import State
from specbench.errors import ConfigError
from specbench.models.attention_mask import ATTENTION, RECURRENT, AttentionMask
from specbench.settings import UNLIMITED_CONTEXT

# The classes of families of decoders, by model type or kind of layer.
DECODERS = dict.fromkeys(("rwkv", *RECURRENT), "specbench.contrib.recurrent.family.RecurrentFamily")
HALVES = (torch.float16, torch.bfloat16)
DIVIDING = ("colwise", "rowwise", "embedding")  # in the names of plans that divide a weight


class LayerState(ABC):
    """The state that layers of a recurrent or hybrid model carry from token to token; it reads chains only."""

    state_bytes: float  # of one row
    one_by_one: bool  # whether every token behind a state has a forward of its own

    @abstractmethod
    def cache(self, columns: SlotCache) -> SlotCache:
        """An empty cache of states that keeps keys and values in `columns`."""

    @abstractmethod
    def logits(
        self, model: Any, words: dict[str, Tensor], slots: Tensor, positions: Tensor, visible: int, row: int | None,
        keep_logits: int = 0,
    ) -> Tensor:  # fmt: skip
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of new tokens, `words` being their ids or embeddings,
        at positions [b, N], in columns slots [b, N], of which attention sees `visible`. `row` is the only row of the
        forward, None for the first b. `model` has a module and a cache."""

    @abstractmethod
    def read_rows(self, model: Any, state: State, begins: Sequence[int], ends: Sequence[int], chunk: int) -> None:
        """Has a `LanguageModel` read tokens begins[b] .. ends[b] - 1 of each row b, `chunk` at a time if possible."""

    @abstractmethod
    def recover(self, model: Any, state: State, width: int) -> int:
        """Rolls a `LanguageModel` back to where at most `width` committed tokens of each active row are missing in its
        state, and has it read those that no kept state has read. Returns how many tokens these are, in all rows."""


class Family:
    """What an architecture needs beside the rest; here, of those that need nothing."""

    def sized(self, config: PretrainedConfig, size: "ModelSize") -> "ModelSize":
        """The size of a model of this configuration, given that of a text model."""
        return size

    def state(self, module: PreTrainedModel, mask: AttentionMask, name: str) -> LayerState | None:
        """The state of a module's layers; None if they have none. Raises ConfigError if it cannot be followed."""
        kinds = set(getattr(mask.config, "layer_types", None) or [])
        attends_alone = bool(kinds) and kinds <= ATTENTION  # as some models of architectures that may have a state
        takes_state = "cache_params" in inspect.signature(module.forward).parameters
        if not attends_alone and (getattr(module, "_is_stateful", False) or takes_state):
            raise ConfigError(
                f"{name} is a {type(module).__name__}, whose recurrent state is kept in a way that is not known: give "
                "another model"
            )
        return None

    def refuse(self, run: Selections, models: Sequence["ModelSize"]) -> None:
        """Raises ConfigError if a model, the target first, is of this family, and another choice does not go."""


NO_FAMILY = Family()


@cache
def _family(name: str) -> Family:
    found: Family = hydra.utils.get_class(name)()
    return found


def family_of(config: PretrainedConfig) -> Family:
    """What models of this configuration need."""
    if config.is_encoder_decoder:
        return NO_FAMILY
    text = config.get_text_config()
    names = (text.model_type, *(getattr(text, "layer_types", None) or ()))
    return next((_family(DECODERS[name]) for name in names if name in DECODERS), NO_FAMILY)


@dataclass(frozen=True)
class ModelSize:
    """The size of one model: bytes of weights and per cached position, and the widths that activations depend on."""

    weights: int  # bytes, with those of buffers
    tied: int  # bytes of an output matrix that is also the embedding: packed, it exists twice
    column: int  # bytes of keys and values of one position
    layers: int
    context: int  # tokens
    vocab_size: int
    widest: int  # values per token of its widest layer
    crossing: int = 0  # bytes of keys and values of one position of an encoder's input, if there is an encoder
    heads: int = 1  # of the encoder
    recurrent: bool = False  # whether some of its layers carry a state
    family: Family = NO_FAMILY
    divisible: int = 0  # bytes of the weights that ranks would share
    halves: bool = False  # whether the checkpoint holds them in 16 bits, none of them quantised

    @staticmethod
    def of(config: Any, dtype: torch.dtype, module: Any) -> "ModelSize":
        """From the shape alone, and its `module` that was built without memory."""
        if config.is_encoder_decoder:
            layers = getattr(config, "num_decoder_layers", None) or config.decoder_layers
            hidden = getattr(config, "d_model", None) or config.hidden_size
            inner = max(getattr(config, name, 0) for name in ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"))
            values = layers * (config.num_heads * config.d_kv if hasattr(config, "d_kv") else hidden)
            crossing, heads, divisible = values, config.num_attention_heads, 0
        else:
            config = config.get_text_config()
            layers, hidden = config.num_hidden_layers, config.hidden_size
            inner = size_of(config, "intermediate_size") or 4 * hidden
            inner = max(inner) if isinstance(inner, list) else inner
            values = sum(map(_values_per_column, layers_of(config)))
            crossing, heads, divisible = 0, 1, _divisible(module)
        head, inputs = module.get_output_embeddings(), module.get_input_embeddings()
        return ModelSize(
            weights=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            tied=head.weight.nbytes if head is not None and head.weight is inputs.weight else 0,
            column=2 * values * dtype.itemsize,
            layers=layers,
            context=context_of(config, "decoder"),
            vocab_size=config.vocab_size,
            widest=2 * inner + 4 * hidden,
            crossing=2 * crossing * dtype.itemsize,
            heads=heads,
            divisible=divisible,
            halves=config.dtype in HALVES,
        )

    def share(self, processes: int) -> "ModelSize":
        """What one of so many processes holds of the model, if they share its weights."""
        if processes == 1:
            return self
        weights = self.weights - self.divisible + -(-self.divisible // processes)
        return replace(self, weights=weights, tied=0, column=-(-self.column // processes), divisible=0)


def _divisible(module: Any) -> int:
    """Bytes of the weights that transformers' plan for tensor parallelism divides: by module, or by parameter."""
    plan = {name for name, style in (module.tp_plan or {}).items() if any(word in style for word in DIVIDING)}
    names = ((re.sub(r"\d+", "*", name), weight.nbytes) for name, weight in module.named_parameters())
    return sum(size for name, size in names if name in plan or name.rpartition(".")[0] in plan)


def size_of(config: Any, name: str) -> Any:
    """A size in a configuration, or None if there is none, or if layers have sizes of their own."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def layers_of(text: Any) -> Sequence[Any]:
    """The configuration of each layer: one and the same, unless layers have sizes of their own."""
    own = getattr(text, "per_layer_config", None)
    return [own[layer] if own else text for layer in range(text.num_hidden_layers)]


def column_bytes(text: Any, itemsize: int) -> int:
    """Bytes of keys and values of one position in all layers."""
    return 2 * itemsize * sum(map(_values_per_column, layers_of(text)))


def _values_per_column(layer: Any) -> int:
    """Numbers in the keys of one position, from a layer's configuration."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    key_heads = getattr(layer, "num_key_value_heads", None) or heads
    return int(key_heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads))


def context_of(config: PretrainedConfig, side: str) -> int:
    """Tokens that the encoder or the decoder, `side`, reads at most. LED has one number for each, MPT its own name."""
    names = (f"max_{side}_position_embeddings", "max_position_embeddings", "max_seq_len")
    return int(next((found for name in names if (found := getattr(config, name, None))), UNLIMITED_CONTEXT))


def stops_of(source: Any) -> list[Any]:
    """The ids that end a text, by a configuration or a tokenizer."""
    found = getattr(source, "eos_token_id", None)
    return found if isinstance(found, list) else [] if found is None else [found]


def loader_of(config: PretrainedConfig) -> str:
    """The name of the class of transformers that makes modules of a configuration."""
    return "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"


def without_memory(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The module of a configuration, without memory for its weights. Errors are those of transformers."""
    kind: Any = getattr(transformers, loader_of(config))
    with torch.device("meta"):
        return kind.from_config(copy.copy(config), dtype=dtype, trust_remote_code=trust_remote_code)
