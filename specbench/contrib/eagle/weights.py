"""EAGLE checkpoints as modules: Llama or Qwen3 layers of transformers, whose first one reads pairs.

d hidden, A layers of the target whose states are read, V vocabulary of the target, V' of the draft model. b rows, N
pairs.
"""

import copy
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specbench.contrib.eagle.config import EagleConfig, eagle_config
from specbench.models.checkpoint import reading, refuse_not_finite
from specbench.models.language_model import LanguageModel
from specbench.models.mtp import PairInput
from specbench.models.published import read_config, read_tensors, refuse_others, targets_of

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
MAPS = ("d2t", "t2d")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OTHER_NAMES = {"midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.",
               "aux_norm_high.": "fc_norm.2."}  # fmt: skip


class FirstLayer(nn.Module):
    """A decoder layer of transformers that attends with embeddings and hidden states side by side, and adds to the
    hidden states."""

    def __init__(self, layer: Any, norm: Callable[[int], nn.Module], config: EagleConfig):
        super().__init__()
        d = config.layers.hidden_size
        self.self_attn, self.mlp, self.post_attention_layernorm = (
            layer.self_attn, layer.mlp, layer.post_attention_layernorm)  # fmt: skip
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn.get_submodule(name)
            setattr(self.self_attn, name, nn.Linear(2 * d, narrow.out_features, bias=narrow.bias is not None))
        self.input_layernorm = layer.input_layernorm if config.first_norm else nn.Identity()
        self.hidden_norm = norm(d)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, pairs: Tensor, **others: Any) -> Tensor:
        """[b, N, d] of embeddings and hidden states [b, N, 2 * d]."""
        embedded, hidden = pairs.chunk(2, -1)
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        x: Tensor = self.self_attn(hidden_states=both, **others)[0]
        x = x + (normed if self.norm_before_residual else hidden)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class FeatureProjection(nn.Module):
    """From the target's hidden states of A layers to one of the draft model."""

    def __init__(self, count: int, norm: Callable[[int], nn.Module], config: EagleConfig, bias: bool):
        super().__init__()
        width = config.target_hidden_size
        self.input_norm = norm(count * width) if config.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm(width) for _ in range(count * config.fc_norm))
        self.fc = nn.Linear(count * width, config.layers.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, N, d] of hidden states [b, N, A * the target's d]."""
        hidden = self.input_norm(hidden)
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        found: Tensor = self.fc(hidden)
        return found


def skeleton(config: EagleConfig, names: Container[str], count: int) -> Any:
    """A module of this shape, with a `pair_input` and `features`, which reads hidden states of `count` layers. `names`
    are those of the checkpoint's tensors, which may lack the embedding and the output matrix."""
    module: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config.layers), attn_implementation="sdpa")
    base, d = module.model, config.layers.hidden_size
    kind, eps = type(base.norm), config.layers.rms_norm_eps

    def norm(width: int) -> nn.Module:
        made: nn.Module = kind(width, eps=eps)
        return made

    module.features = nn.Identity()
    joined: nn.Module = nn.Identity()
    if config.version == 1:
        joined = nn.Linear(2 * d, d, bias=config.bias)
        base.layers[0].input_layernorm = base.norm = nn.Identity()
    else:
        base.layers[0] = FirstLayer(base.layers[0], norm, config)
        if config.mask_token is not None:
            module.mask_token = config.mask_token
            module.mask_hidden = nn.Parameter(torch.empty(1, 1, count * config.target_hidden_size))
        if config.aux:
            module.features = FeatureProjection(count, norm, config, "fc.bias" in names)
        elif "layers.0.hidden_norm.weight" not in names:
            base.layers[0].hidden_norm = nn.Identity()
        base.norm = base.norm if config.last_norm else nn.Identity()
        module.set_output_embeddings(nn.Linear(d, config.draft_vocab_size, bias=False))
    module.pair_input = PairInput(nn.Identity(), nn.Identity(), joined)
    module.set_input_embeddings(nn.Embedding(config.vocab_size, d))
    return module


def known_name(name: str) -> str:
    """A checkpoint's name of a tensor as speculators has it."""
    name = name.removeprefix("model.")
    return next((new + name.removeprefix(old) for old, new in OTHER_NAMES.items() if name.startswith(old)), name)


def own_name(name: str) -> str:
    """As `known_name`, of a tensor of our module."""
    return re.sub(r"^(model|features)\.", "", name.replace("pair_input.projection.", "fc."))


def inspect(key: str, path: str, version: int, wanted: list[int] | None) -> tuple[EagleConfig, dict[str, Tensor]]:
    """The shape of a checkpoint, and its tensors by `known_name`. `wanted` are the layers whose hidden states it reads,
    None for those that it says. Raises ConfigError if its config.json and its tensors disagree, or are not known."""
    with reading(key, path, f"EAGLE-{version} weights"):
        config = eagle_config(read_config(path, key), version)
        found = {known_name(name): tensor for name, tensor in read_tensors(path, key).items()}
        if not all(tensor.dtype in FLOATS for name, tensor in found.items() if name not in MAPS):
            raise ValueError("it has weights of 8 bits or of whole numbers, and only 16 and 32 bits can be read")
        with torch.device("meta"):
            module = skeleton(config, found, features_of(config, wanted))
        own = {own_name(name): tensor for name, tensor in module.state_dict().items()}
        if config.version == 1:
            del own[HEAD]
        given = {name: tensor for name, tensor in found.items() if config.version == 1 or name not in MAPS}
        fits = config.target_hidden_size == config.layers.hidden_size  # so that the target's may serve
        optional = (EMBEDDING, HEAD) if fits else ()
        refuse_others(own, given, f"{key}={path}", optional)
        draft_targets(found, config)
    return config, found


def features_of(config: EagleConfig, wanted: list[int] | None) -> int:
    """A, the number of the target's layers whose hidden states it reads."""
    return len(wanted or config.ids or (0, 0, 0))


def draft_targets(found: Mapping[str, Tensor], config: EagleConfig) -> Tensor | None:
    """`targets_of` a checkpoint: EAGLE-1 predicts all tokens."""
    return None if config.version == 1 else targets_of(found, config.draft_vocab_size, config.vocab_size)


def load_eagle(
    path: str, key: str, target: LanguageModel, version: int, wanted: list[int] | None
) -> tuple[PreTrainedModel, EagleConfig, Tensor | None]:
    """The module of a checkpoint on the target's device, with the target's embedding and output matrix where it has
    none of its own; its shape; and `draft_targets` of it. Raises ConfigError."""
    config, found = inspect(key, path, version, wanted)
    with reading(key, path, f"EAGLE-{version} weights"):
        module = skeleton(config, found, features_of(config, wanted))
        stock: Any = target.stock_module()
        borrowed = [name for name in (EMBEDDING, HEAD) if name not in found]
        names = {name: own_name(name) for name in module.state_dict()}
        state = {name: found[own].to(target.dtype) for name, own in names.items() if own not in borrowed}
        module.load_state_dict(state, strict=False, assign=True)
        targets = draft_targets(found, config)
    if EMBEDDING in borrowed:
        module.set_input_embeddings(stock.get_input_embeddings())
    if HEAD in borrowed:
        head = stock.get_output_embeddings()
        if targets is not None:  # its rows for these tokens
            rows, head = head.weight.detach()[targets.to(head.weight.device)], module.get_output_embeddings()
            head.weight = nn.Parameter(rows.to(target.dtype), requires_grad=False)
        module.set_output_embeddings(head)
    module.config.vocab_size = len(module.get_input_embeddings().weight)
    loaded: PreTrainedModel = module.to(target.device).eval()
    refuse_not_finite(loaded, f"{key}={path}", target.dtype)
    return loaded, config, targets
