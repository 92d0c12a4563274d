"""What a model's configuration says before it loads: its size, its context and the class that makes it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from specbench.models.recurrent import attending_layers, has_state
from specbench.settings import UNLIMITED_CONTEXT

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ModelSize:
    """The size of one model: bytes of weights and per cached position, and the widths that activations depend on."""

    weights: int  # bytes, with those of buffers
    column: int  # bytes of keys and values of one position
    layers: int
    context: int  # tokens
    vocab_size: int
    widest: int  # values per token of its widest layer
    crossing: int = 0  # bytes of keys and values of one position of an encoder's input, if there is an encoder
    heads: int = 1  # of the encoder
    recurrent: bool = False  # whether some of its layers carry a state
    halves: bool = False  # whether the checkpoint holds them in 16 bits, none of them quantised

    @staticmethod
    def of(config: Any, dtype: torch.dtype, module: Any) -> "ModelSize":
        """From the shape alone, and its `module` that was built without memory."""
        crossing, heads = 0, 1
        if config.is_encoder_decoder:
            layers = getattr(config, "num_decoder_layers", None) or config.decoder_layers
            hidden = getattr(config, "d_model", None) or config.hidden_size
            inner = max(getattr(config, name, 0) for name in ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"))
            values = layers * (config.num_heads * config.d_kv if "d_kv" in config.to_dict() else hidden)
            crossing, heads = values, config.num_attention_heads
        else:
            config = config.get_text_config()
            layers, hidden = config.num_hidden_layers, config.hidden_size
            inner = size_of(config, "intermediate_size") or 4 * hidden
            inner = max(inner) if isinstance(inner, list) else inner
            values = sum(map(_values_per_column, layers_of(config)))
            if has_state(config):
                values = values * attending_layers(config) // layers
        return ModelSize(
            weights=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            column=2 * values * dtype.itemsize,
            layers=layers,
            context=context_of(config, "decoder"),
            vocab_size=config.vocab_size,
            widest=2 * inner + 4 * hidden,
            crossing=2 * crossing * dtype.itemsize,
            heads=heads,
            recurrent=has_state(config),
            halves=config.dtype in HALVES,
        )


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
    """Tokens that the encoder or the decoder, `side`, reads at most. LED has one number for each."""
    names = (f"max_{side}_position_embeddings", "max_position_embeddings", "max_seq_len")
    return int(next((found for name in names if (found := getattr(config, name, None))), UNLIMITED_CONTEXT))


def stops_of(source: Any) -> list[Any]:
    """The ids that end a text, by a configuration or a tokenizer."""
    found = getattr(source, "eos_token_id", None)
    return found if isinstance(found, list) else [] if found is None else [found]


def loader_of(config: PretrainedConfig) -> Any:
    """The class of transformers that makes modules of a configuration."""
    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def without_memory(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The module of a configuration, without memory for its weights. Errors are those of transformers."""
    with torch.device("meta"):
        return loader_of(config).from_config(copy.copy(config), dtype=dtype, trust_remote_code=trust_remote_code)
