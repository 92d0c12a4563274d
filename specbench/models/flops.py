"""Multiply-adds and bytes of weights per token, for the ratio c_hat of Definition 3.10 and for the bandwidth."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig, PreTrainedModel

from specbench.models.sizes import first_of

# Names that transformers gives to the attention to an encoder's outputs, whose keys and values have not the input of q.
CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "crossattention")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts")  # names in configs
INPUT_SIDE = ("k", "v", "k_proj", "v_proj")  # what makes keys and values of an encoder's outputs, once a request


class Stored(NamedTuple):
    """The weights of a module: how many, each once, and their bytes."""

    numbers: int
    bytes: int


def stored(module: nn.Module) -> Stored:
    """The weights of a module as it runs."""
    weights = list(module.parameters())
    held = sum(part.nbytes for weight in weights for part in plain_parts(weight))
    return Stored(sum(weight.numel() for weight in weights), held)


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
    whole, unused, experts = stored(used), stored(nn.ModuleList(idle)), idle_experts(used, module.config)
    return round(whole.numbers - unused.numbers - experts[0]), round(whole.bytes - unused.bytes - experts[1])


def expert_layers(module: nn.Module) -> list[nn.Module]:
    """The modules that hold the weights of all experts of a layer, each stacked [experts, out, in], in order."""
    return [child for child in module.modules() if count_of(child) > 1]


def count_of(child: nn.Module) -> int:
    """How many experts a module holds, 0 if it holds none."""
    count = vars(child).get("num_experts")
    stacked = [p for p in child.parameters(recurse=False) if p.dim() == 3 and p.shape[0] == count]
    return int(count) if isinstance(count, int) and stacked else 0


def idle_experts(module: nn.Module, config: PretrainedConfig) -> tuple[float, float]:
    """Weights, and their bytes, of the routed experts that a forward of one token does not use."""
    chosen = first_of(config.get_text_config(), *CHOSEN)
    numbers = held = 0.0
    for layer in expert_layers(module) if chosen is not None else ():
        share = max(0.0, 1 - chosen / count_of(layer))
        numbers += share * sum(p.numel() for p in layer.parameters(recurse=False))
        held += share * sum(p.nbytes for p in layer.parameters(recurse=False))
    return numbers, held
