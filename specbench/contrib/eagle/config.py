"""What the config.json of an EAGLE checkpoint says, in each of its dialects.

EAGLE-3 has three: SafeAILab's and SpecForge's (the options stand beside those of a Llama), that of speculators (the
layers have a configuration of their own), and Model-Optimizer's (`eagle_config`). EAGLE-1 and EAGLE-2 have one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from specbench.models.checkpoint import few

LAYERS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
IDS = "eagle_aux_hidden_state_layer_ids"
KINDS = ("eagle3", "peagle")  # of speculators
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PLAIN = {*FLAGS, "draft_vocab_size", "target_hidden_size", "bias", "eagle_config", IDS}
OPTIMIZER = {IDS, "use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm",
             "use_mtp_layernorm", "next_layer_regular"}  # fmt: skip
SPECULATORS = {*FLAGS, "speculators_model_type", "speculators_version", "speculators_config", "draft_vocab_size",
               "transformer_layer_config", "target_hidden_size", "embed_requires_grad", IDS}  # fmt: skip
# Of any checkpoint: older names of what transformers reads, and what is for training or for showing.
ANY = {*PretrainedConfig().to_dict(), "rope_theta", "rope_scaling", "torch_dtype", "auto_map", "_attn_implementation",
       "attn_implementation", "tie_word_embeddings", "quantization_config", "has_no_defaults_at_init",
       "model_type"}  # fmt: skip
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE draft model."""

    layers: PretrainedConfig  # of its decoder layers, without an embedding
    version: int  # 1 (EAGLE-1 and EAGLE-2) or 3
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    ids: tuple[int, ...] | None = None  # of the target's layers, as they stand there
    shift: int = 0  # id i is said to mean the hidden states in front of layer i + shift
    aux: bool = True  # whether it reads hidden states of several layers
    first_norm: bool = True  # whether embeddings are normed
    last_norm: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    bias: bool = False  # of EAGLE-1's projection
    mask_token: int | None = None  # P-EAGLE guesses all tokens of a draft at once, behind masks


def eagle_config(config: Mapping[str, Any], version: int) -> EagleConfig:
    """The shape that a config.json says. Raises ValueError that names what is wrong or not known."""
    if config.get("quantization_config"):
        raise ValueError("its weights are quantised, and only 16 and 32 bits can be read")
    kind = config.get("speculators_model_type")
    if kind is not None:
        if version == 1 or kind not in KINDS:
            raise ValueError(f"its speculators_model_type is {kind}" + (", choose drafter=eagle3" * (kind in KINDS)))
        _refuse_unknown(config, SPECULATORS | ANY | ({"mask_token_id"} if kind == "peagle" else set()))
        layers = config.get("transformer_layer_config")
        if not isinstance(layers, dict):
            raise ValueError("it has no transformer_layer_config")
        found = _shape(config, _layers(layers), version)
        mask = config.get("mask_token_id")
        if kind == "peagle" and not (type(mask) is int and 0 <= mask < found.vocab_size):
            raise ValueError(f"mask_token_id={mask}, which must be from 0 to {found.vocab_size - 1}")
        return replace(found, mask_token=mask)
    missing = [name for name in NEEDED if name not in config]
    if missing:
        raise ValueError(f"it has no {few(missing)}")
    return _shape(config, _layers({k: v for k, v in config.items() if k not in PLAIN}), version)


def _shape(config: Mapping[str, Any], layers: PretrainedConfig, version: int) -> EagleConfig:
    """The shape of a model with these decoder layers. Raises ValueError."""
    vocab_size, hidden, more = layers.vocab_size, layers.hidden_size, config.get("eagle_config") or {}
    _refuse_unknown(more, OPTIMIZER, "eagle_config.")
    if more.get("use_mtp_layernorm") or not (more.get("next_layer_regular", True) or layers.num_hidden_layers == 1):
        raise ValueError("its eagle_config asks for use_mtp_layernorm or for no next_layer_regular, which are unknown")
    layers.vocab_size, layers.pad_token_id, layers.tie_word_embeddings = 1, None, False  # others embed its tokens
    ids = config.get(IDS, more.get(IDS))
    if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
        raise ValueError(f"{IDS}={ids}, which must be a list of numbers of layers")
    return EagleConfig(
        layers, version, vocab_size, config.get("draft_vocab_size") or vocab_size,
        target_hidden_size=config.get("target_hidden_size") or hidden,
        ids=None if ids is None else tuple(ids), shift=int(IDS in more and IDS not in config),
        aux=version == 3 and bool(more.get("use_aux_hidden_state", True)),
        first_norm=bool(more.get("use_input_layernorm_in_first_layer", True)),
        last_norm=bool(more.get("use_last_layernorm", True)), bias=bool(config.get("bias", version == 1)),
        **{name: bool(config.get(name, False)) for name in FLAGS},
    )  # fmt: skip


def _layers(values: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of decoder layers. Raises ValueError."""
    kind = LAYERS.get(values.get("model_type", "llama"))
    if kind is None:
        raise ValueError(f"it has layers of model_type={values['model_type']}, which must be {' or '.join(LAYERS)}")
    _refuse_unknown(values, {*kind().to_dict()} | ANY)
    unread = ("model_type", "quantization_config")
    found: PretrainedConfig = kind(**{name: value for name, value in values.items() if name not in unread})
    return found


def _refuse_unknown(values: Mapping[str, Any], known: set[str], where: str = "") -> None:
    unknown = [f"{where}{name}={values[name]}" for name in values if name not in known]
    if unknown:
        raise ValueError(f"its config.json says {few(unknown)}, which is not known")


def feature_layers(config: EagleConfig, total: int, wanted: list[int] | None) -> list[tuple[int, ...]]:
    """The layers of a target of `total` layers in front of which a draft model may read hidden states: those that are
    wanted or, if a list of ids may mean two things, both, the documented one first. Raises ValueError if a layer is
    not there."""
    if not config.aux:
        return [()]
    if wanted is not None:
        found = [tuple(wanted)]
    elif config.ids is None:
        found = [(2, total // 2, total - 3)]
    else:
        shifts = (config.shift, 1 - config.shift)
        found = [tuple(i + shift for i in config.ids) for shift in shifts]
    there = [layers for layers in found if all(0 <= layer <= total for layer in layers)]
    if not there:
        raise ValueError(f"it reads hidden states in front of layers {list(found[0])}, but the target has {total}")
    return there
