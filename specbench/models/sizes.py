"""What a model's configuration says before it loads: its size, its context and the class that makes it; and what a
loaded one reads and multiplies per token, for the ratio c_hat of Definition 3.10 and for the bandwidth."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig, PreTrainedModel

from specbench.models.attention_mask import attending_layers, has_state
from specbench.settings import UNLIMITED_CONTEXT

HALVES = (torch.float16, torch.bfloat16)
READ_CHUNK = 2048  # tokens of a text that a model reads in a forward, by default
# Names that transformers gives to the attention to an encoder's outputs, whose keys and values have not the input of q.
CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "crossattention")
INPUT_SIDE = ("k", "v", "k_proj", "v_proj")  # what makes keys and values of an encoder's outputs, once a request
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts")  # names in configs


@dataclass(frozen=True)
class ModelSize:
    """The size of one model: bytes of weights and per cached position, and the widths that activations depend on."""

    weights: int  # bytes, with those of buffers
    column: int  # bytes of keys and values of one position
    context: int  # tokens
    vocab_size: int
    widest: int  # values per token that its widest layer works on
    crossing: int = 0  # bytes of keys and values of one position of an encoder's input, if there is an encoder
    heads: int = 1  # of the encoder
    recurrent: bool = False  # whether some of its layers carry a state
    halves: bool = False  # whether the checkpoint holds them in 16 bits, none of them quantised

    @staticmethod
    def of(config: Any, dtype: torch.dtype, module: Any) -> "ModelSize":
        """From the shape alone, and its `module` that was built without memory."""
        encodes, recurrent = config.is_encoder_decoder, has_state(config)
        text = config.get_text_config(decoder=True)
        values = sum(map(_values_per_column, text.per_layer_config))
        if recurrent:
            values = values * attending_layers(text) // text.num_hidden_layers
        looked_up = [part for part in module.modules() if isinstance(part, nn.Embedding)]
        tables = {id(part.weight) for part in (*looked_up, module.get_output_embeddings())}
        matrices = [p.shape for p in module.parameters() if p.dim() > 1 and id(p) not in tables]
        return ModelSize(
            weights=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            column=2 * values * dtype.itemsize,
            context=context_of(text, "decoder"),
            vocab_size=text.vocab_size,
            widest=2 * max((max(shape[-2:]) for shape in matrices), default=0) + 4 * text.hidden_size,
            crossing=2 * values * dtype.itemsize if encodes else 0,
            heads=text.num_attention_heads if encodes else 1,
            recurrent=recurrent,
            halves=config.dtype in HALVES,
        )


def first_of(config: Any, *names: str) -> Any:
    """The first of these values that a configuration has: architectures name them differently. None without any."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _values_per_column(layer: Any) -> int:
    """Numbers in the keys of one position, from a layer's configuration."""
    heads = first_of(layer, "num_attention_heads") or 1
    key_heads = first_of(layer, "num_key_value_heads") or heads
    return int(key_heads * (first_of(layer, "head_dim") or layer.hidden_size // heads))


def context_of(config: PretrainedConfig, side: str) -> int:
    """Tokens that the encoder or the decoder, `side`, reads at most. LED has one number for each."""
    found = first_of(config, f"max_{side}_position_embeddings", "max_position_embeddings", "max_seq_len")
    return min(int(found or UNLIMITED_CONTEXT), rotary_switch(config))


def rotary_switch(config: PretrainedConfig) -> int:
    """The length in tokens beyond which `longrope` takes other rotary frequencies for all positions of all rows of a
    forward. Keys that are in the cache by then are wrong: no text may cross it. `dynamic` frequencies change beyond
    max_position_embeddings, which no text crosses."""
    rope = first_of(config, "rope_parameters") or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # for all layers, or by their kind
    name = "original_max_position_embeddings"
    lengths = [kind.get(name) or first_of(config, name) for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([UNLIMITED_CONTEXT, *(int(length) for length in lengths if length)])  # compilers read no default


def stops_of(source: Any) -> list[Any]:
    """The ids that end a text, by a configuration or a tokenizer."""
    found = first_of(source, "eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]


def loader_of(config: PretrainedConfig) -> Any:
    """The class of transformers that makes modules of a configuration."""
    return transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM


def without_memory(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The module of a configuration, without memory for its weights. Errors are those of transformers."""
    with torch.device("meta"):
        return loader_of(config).from_config(copy.copy(config), dtype=dtype, trust_remote_code=trust_remote_code)


def stored(module: nn.Module) -> tuple[int, int]:
    """The numbers in all weights of a module as it runs, each weight once, and their bytes."""
    weights = list(module.parameters())
    return sum(weight.numel() for weight in weights), sum(map(bytes_of, weights))


def bytes_of(weight: Tensor) -> int:
    """The bytes of a weight as it is stored."""
    return sum(part.nbytes for part in plain_parts(weight))


def plain_parts(weight: Tensor) -> list[Tensor]:
    """The plain tensors of a weight, all of any shape: itself, or those that a quantiser's own kind consists of."""
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    return [part for name in weight.__tensor_flatten__()[0] for part in plain_parts(getattr(weight, name))]


def per_token(module: PreTrainedModel) -> tuple[int, int]:
    """Multiply-adds with the weights of a module in a forward of one token (Definition 3.10), and bytes of weights that
    this process reads for it. An embedding that is not also the output matrix is looked up, not multiplied; experts
    that the token is not routed to are not read. Of an encoder-decoder only the decoder runs in a step."""
    stock: Any = module
    head = stock.get_output_embeddings()
    used = nn.ModuleList([stock.get_decoder(), head]) if module.config.is_encoder_decoder else module
    outputs = [id(weight) for weight in head.parameters()]
    crossing = [part for path, part in used.named_modules() if path.rpartition(".")[2] in CROSS_ATTENTION]
    idle = [child for part in crossing for name, child in part.named_children() if name in INPUT_SIDE]
    idle += [part for part in used.modules() if isinstance(part, nn.Embedding) and id(part.weight) not in outputs]
    share = {id(weight): 0.0 for part in idle for weight in part.parameters()} | expert_shares(used, module.config)
    weights = [(weight, share.get(id(weight), 1.0)) for weight in used.parameters()]
    return (
        round(sum(part * weight.numel() for weight, part in weights)),
        round(sum(part * bytes_of(weight) for weight, part in weights)),
    )


def expert_shares(module: nn.Module, config: PretrainedConfig) -> dict[int, float]:
    """By id of each weight [experts, out, in] that holds a layer's experts, the share that a token is routed to."""
    chosen = first_of(config.get_text_config(), *CHOSEN)
    found: dict[int, float] = {}
    for layer in module.modules() if chosen is not None else ():
        count, own = vars(layer).get("num_experts"), list(layer.parameters(recurse=False))
        if isinstance(count, int) and any(weight.dim() == 3 and len(weight) == count for weight in own):
            found |= {id(weight): min(1.0, chosen / count) for weight in own}
    return found
