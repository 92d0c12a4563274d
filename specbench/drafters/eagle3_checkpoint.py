"""EAGLE-3 checkpoints (2503.01840): what their config.json says, and the module that their tensors make.

Three dialects are read: SafeAILab's and SpecForge's (the options stand beside those of a Llama), that of speculators
(the layers have a configuration of their own), and Model-Optimizer's (`eagle_config`). The module is decoder layers of
transformers, Llama's or Qwen3's, of which the first one reads pairs of an embedding and a hidden state.

d hidden, A layers of the target whose hidden states are read, V vocabulary of the target, V' of the draft model. b
rows, N pairs.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from specbench.drafters.pair_model import PairInput
from specbench.errors import ConfigError
from specbench.models.checkpoint import few, reading, refuse_not_finite
from specbench.models.language_model import LanguageModel
from specbench.models.published import checked, layer_config, read_config, read_tensors, refuse_others, targets_of
from specbench.settings import BaseSettings

WHAT = "EAGLE-3 weights"
LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
IDS = "eagle_aux_hidden_state_layer_ids"
USUAL = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
         "use_mtp_layernorm": False, "next_layer_regular": True}  # fmt: skip
# What speculators writes and no draft needs.
NOT_USED = {"speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
            "embed_requires_grad", "eagle_config", "target_layer_ids", "ttt_length", "step_loss_decay",
            "draft_num_hidden_layers", "num_target_layers", "target_model_name_or_path"}  # fmt: skip
EMBEDDING, HEAD, MAPS = "embed_tokens.weight", "lm_head.weight", ("d2t", "t2d")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OTHER_NAMES = {"midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.",
               "aux_norm_high.": "fc_norm.2."}  # fmt: skip


class Options(BaseSettings):
    """Keys of config.json beside those of the decoder layers."""

    draft_vocab_size: int | None = Field(default=None, ge=1)
    target_hidden_size: int | None = Field(default=None, ge=1)
    eagle_aux_hidden_state_layer_ids: list[Annotated[int, Field(ge=0)]] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of an EAGLE-3 draft model."""

    layers: PretrainedConfig  # of its decoder layers, without an embedding
    options: Options
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    ids: tuple[int, ...] | None  # of the target's layers in front of which hidden states are read

    def layers_of(self, total: int) -> tuple[int, ...]:
        """The layers, of a target with `total` layers, in front of which hidden states are read."""
        return self.ids or (2, total // 2, total - 3)


def parse_config(config: Mapping[str, Any], wanted: list[int] | None, named: str) -> Eagle3Config:
    """The shape that a config.json says; `wanted` are the layers whose hidden states are read, None for those that it
    names; `named` is the checkpoint in errors. Raises ConfigError that names what is wrong or not known."""
    kind = config.get("speculators_model_type")
    if config.get("quantization_config"):
        raise ConfigError(f"{named} has quantised weights: only 16 and 32 bits can be read")
    if kind not in (None, "eagle3"):
        raise ConfigError(f"{named} has speculators_model_type={kind} in its config.json: it must be eagle3")
    own = {name: value for name, value in config.items() if name not in NOT_USED}
    layers = config.get("transformer_layer_config", {})
    if kind is None:  # the options stand beside the keys of a Llama
        layers = {name: value for name, value in own.items() if name not in Options.model_fields}
        own = {name: value for name, value in own.items() if name in Options.model_fields}
    if missing := [name for name in NEEDED if name not in layers]:
        raise ConfigError(f"{named} has no {few(missing)} in its config.json")
    options, made = checked(Options, own, named), layer_config(layers, LAYERS, named)
    behind = {IDS: config["target_layer_ids"]} if "target_layer_ids" in config else {}  # of DeepSpec
    ids = wanted or options.eagle_aux_hidden_state_layer_ids
    ids = ids or _of_optimizer(config.get("eagle_config") or behind, named)
    V, d = made.vocab_size, made.hidden_size
    sizes = (V, options.draft_vocab_size or V, options.target_hidden_size or d)
    made.vocab_size, made.pad_token_id, made.tie_word_embeddings = 1, None, False  # others embed its tokens
    return Eagle3Config(made, options, *sizes, None if ids is None else tuple(ids))


def _of_optimizer(more: Mapping[str, Any], named: str) -> list[int] | None:
    """The layers in front of which hidden states are read by `eagle_config`. Raises ConfigError."""
    for name, value in more.items():
        if name != IDS and USUAL.get(name) is not value:
            raise ConfigError(f"{named} has eagle_config.{name}={value} in its config.json, which is not known")
    ids = checked(Options, {name: value for name, value in more.items() if name == IDS}, named)
    found = ids.eagle_aux_hidden_state_layer_ids
    return None if found is None else [layer + 1 for layer in found]  # it numbers the layers behind which it reads


class FirstLayer(nn.Module):
    """A decoder layer of transformers that attends with embeddings beside hidden states, and adds to the latter."""

    def __init__(self, layer: Any, norm: Callable[[int], nn.Module], config: Eagle3Config):
        super().__init__()
        d = config.layers.hidden_size
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.post_attention_layernorm, self.input_layernorm = layer.post_attention_layernorm, layer.input_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn.get_submodule(name)
            setattr(self.self_attn, name, nn.Linear(2 * d, narrow.out_features, bias=narrow.bias is not None))
        self.hidden_norm = norm(d)
        self.norm_before_residual = config.options.norm_before_residual

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

    def __init__(self, count: int, norm: Callable[[int], nn.Module], config: Eagle3Config, bias: bool):
        super().__init__()
        width = config.target_hidden_size
        self.input_norm = norm(count * width) if config.options.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm(width) for _ in range(count * config.options.fc_norm))
        self.fc = nn.Linear(count * width, config.layers.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, N, d] of hidden states [b, N, A * the target's d]."""
        hidden = self.input_norm(hidden)
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        found: Tensor = self.fc(hidden)
        return found


def skeleton(config: Eagle3Config, bias: bool) -> Any:
    """A module of this shape, with a `pair_input` and `features`; `bias` is whether the projection has one."""
    module: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config.layers), attn_implementation="sdpa")
    base, d = module.model, config.layers.hidden_size
    kind: Any = type(base.norm)
    norm = partial(kind, eps=config.layers.rms_norm_eps)
    base.layers[0] = FirstLayer(base.layers[0], norm, config)
    module.features = FeatureProjection(len(config.ids or (0, 0, 0)), norm, config, bias)
    module.pair_input = PairInput(nn.Identity(), nn.Identity(), nn.Identity())
    module.set_input_embeddings(nn.Embedding(config.vocab_size, d))
    module.set_output_embeddings(nn.Linear(d, config.draft_vocab_size, bias=False))
    return module


def known_name(name: str) -> str:
    """A checkpoint's name of a tensor as speculators has it."""
    name = name.removeprefix("model.")
    return next((new + name.removeprefix(old) for old, new in OTHER_NAMES.items() if name.startswith(old)), name)


def own_name(name: str) -> str:
    """As `known_name`, of a tensor of our module."""
    return re.sub(r"^(model|features)\.", "", name)


def inspect(path: str, key: str, wanted: list[int] | None) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """The shape of a checkpoint, and its tensors by `known_name`; `wanted` as in `parse_config`. Raises ConfigError if
    its config.json and its tensors disagree, or are not known."""
    with reading(key, path, WHAT):
        config = parse_config(read_config(path, key), wanted, f"{key}={path}")
        found = {known_name(name): tensor for name, tensor in read_tensors(path, key).items()}
        if not all(tensor.dtype in FLOATS for name, tensor in found.items() if name not in MAPS):
            raise ValueError("it has weights of 8 bits or of whole numbers, and only 16 and 32 bits can be read")
        with torch.device("meta"):
            module = skeleton(config, "fc.bias" in found)
        own = {own_name(name): tensor for name, tensor in module.state_dict().items()}
        given = {name: tensor for name, tensor in found.items() if name not in MAPS}
        fits = config.target_hidden_size == config.layers.hidden_size  # so that the target's may serve
        refuse_others(own, given, f"{key}={path}", (EMBEDDING, HEAD) if fits else ())
        targets_of(found, config.draft_vocab_size, config.vocab_size)
    return config, found


def refuse_unfit(config: Eagle3Config, named: str, target: str, text: Any) -> None:
    """Raises ConfigError if a draft model does not fit a target whose configuration is `text`."""
    refused, total = f"{named} is not possible with target.path={target}", text.num_hidden_layers
    if config.target_hidden_size != text.hidden_size:
        sizes = f"{config.target_hidden_size}, and the target's have {text.hidden_size}"
        raise ConfigError(f"{refused}: it reads hidden states of {sizes}")
    layers = config.layers_of(total)
    if not all(0 <= layer <= total for layer in layers):
        raise ConfigError(
            f"{refused}: it reads hidden states in front of layers {list(layers)}, but the target has {total}: give "
            "drafter.feature_layers"
        )
    if config.vocab_size > text.vocab_size and config.draft_vocab_size < config.vocab_size:
        raise ConfigError(f"{refused}: it is for {config.vocab_size} tokens, and the target has {text.vocab_size}")


def load_eagle3(
    path: str, key: str, target: LanguageModel, wanted: list[int] | None
) -> tuple[PreTrainedModel, Eagle3Config, Tensor | None]:
    """The module of a checkpoint on the target's device, with the target's embedding and output matrix where it has
    none; its shape; the target's token [V'] of each of its tokens, None if they are the same. Raises ConfigError."""
    config, found = inspect(path, key, wanted)
    refuse_unfit(config, f"{key}={path}", target.name, target.config)
    with reading(key, path, WHAT):
        module = skeleton(config, "fc.bias" in found)
        names = {name: own_name(name) for name in module.state_dict()}
        state = {name: found[own].to(target.dtype) for name, own in names.items() if own in found}
        module.load_state_dict(state, strict=False, assign=True)
        targets = targets_of(found, config.draft_vocab_size, config.vocab_size)
    stock: Any = target.stock
    if EMBEDDING not in found:
        module.set_input_embeddings(stock.get_input_embeddings())
    if HEAD not in found:
        head = stock.get_output_embeddings()
        if targets is not None:  # the rows of these tokens
            rows, head = head.weight.detach()[targets.to(head.weight.device)], module.get_output_embeddings()
            head.weight = nn.Parameter(rows.to(target.dtype), requires_grad=False)
        module.set_output_embeddings(head)
    module.config.vocab_size = len(module.get_input_embeddings().weight)
    loaded: PreTrainedModel = module.to(target.device).eval()
    refuse_not_finite(loaded, f"{key}={path}", target.dtype)
    return loaded, config, targets
