"""What the config.json of a DFlash checkpoint says, in the dialects of z-lab and of speculators, DSpark's included."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

from specbench.errors import ConfigError
from specbench.models.published import GENERAL, read_config, refuse_unknown_keys, whole_number

INNER = {"mask_token_id", "target_layer_ids", "block_size", "use_swa", "swa_window_size", "markov_rank",
         "markov_head_type", "confidence_head_with_markov", "enable_confidence_head", "sample_from_anchor",
         "projector_type", "causal"}  # fmt: skip
Z_LAB = {"block_size", "num_target_layers", "dflash_config"}
SPECULATORS = {"speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
               "draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id",
               "sliding_window_non_causal", *INNER}  # fmt: skip
LAYER = {*Qwen3Config().to_dict(), *GENERAL, "rope_theta", "rope_scaling"}


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a DFlash drafter."""

    layers: Qwen3Config  # its decoder layers
    block: int  # rows that it reads: the last committed token and masks
    mask: int  # the token that stands for one that is not known
    ids: tuple[int, ...] | None  # of the target's layers in front of which hidden states are read; None: the default's
    from_anchor: bool = False  # whether the last committed token's row guesses too
    draft_vocab: int | None = None  # tokens that it predicts, if fewer than the target's
    causal_windows: bool = False  # whether rows of a block see earlier rows only, in layers with a sliding window
    markov: int = 0  # the rank of DSpark's bias by the previous token; 0: none

    @property
    def longest(self) -> int:
        """The most guesses of one draft."""
        return self.block if self.from_anchor else self.block - 1

    def layers_of(self, total: int) -> tuple[int, ...]:
        """In front of which of a target's layers, `total` in all, hidden states are read."""
        count = self.layers.num_hidden_layers
        if self.ids is not None:
            return self.ids
        between = [1 + i * (total - 4) / (count - 1) for i in range(count)] if count > 1 else [total // 2]
        return tuple(round(place) + 1 for place in between)


def read_dflash(path: str, key: str) -> DFlashConfig:
    """The shape of a folder's or hub id's drafter. Raises ConfigError that names what is wrong or not known."""
    config, named = read_config(path, key), f"{key}={path}"
    kind = config.get("speculators_model_type")
    if kind is None and not isinstance(config.get("dflash_config"), dict):
        raise ConfigError(f"{named} is no DFlash checkpoint: its config.json has no dflash_config and no "
                          "speculators_model_type")  # fmt: skip
    if kind is not None and kind not in ("dflash", "dspark"):
        raise ConfigError(f"{named} has speculators_model_type={kind} in its config.json: it must be dflash or dspark")
    if config.get("quantization_config"):
        raise ConfigError(f"{named} has quantised weights: only 16 and 32 bits can be read")
    if kind is None:
        refuse_unknown_keys(config, Z_LAB | LAYER, named)
        inner = config["dflash_config"]
        refuse_unknown_keys(inner, INNER, f"{named}, in its dflash_config,")
        own = {"block_size": config.get("block_size")} | inner
        return _shape(own, {k: v for k, v in config.items() if k not in Z_LAB}, named, shift=1)
    refuse_unknown_keys(config, SPECULATORS, named)
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise ConfigError(f"{named} has no transformer_layer_config in its config.json")
    refuse_unknown_keys(layers, LAYER, f"{named}, in its transformer_layer_config,")
    own = dict(config, target_layer_ids=config.get("aux_hidden_state_layer_ids"))
    own.setdefault("sample_from_anchor", kind == "dspark")
    own.setdefault("markov_rank", 256 if kind == "dspark" else 0)
    return _shape(own, layers, named, shift=0)


def _shape(own: Mapping[str, Any], layers: Mapping[str, Any], named: str, shift: int) -> DFlashConfig:
    """The shape by what one dialect says; id i of a layer means the hidden states in front of layer i + shift."""
    if layers.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"{named} has layers of model_type={layers['model_type']}: it must be qwen3")
    for name, known in (("markov_head_type", (None, "vanilla")), ("projector_type", (None, "dflash", "linear")),
                        ("causal", (None, False))):  # fmt: skip
        if own.get(name) not in known:
            raise ConfigError(f"{named} has {name}={own[name]} in its config.json, which cannot be read: "
                              f"it must be {' or '.join(str(value) for value in known[1:])}")  # fmt: skip
    ids = own.get("target_layer_ids")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
        raise ConfigError(f"{named} has layer ids {ids} in its config.json: it must be a list of numbers of layers")
    made = Qwen3Config(**{name: value for name, value in layers.items() if name != "model_type"})
    if own.get("use_swa"):
        made.sliding_window = whole_number(own, "swa_window_size", named)
        made.layer_types = ["sliding_attention"] * made.num_hidden_layers
    return DFlashConfig(
        made, whole_number(own, "block_size", named, least=2), whole_number(own, "mask_token_id", named, least=0),
        None if ids is None else tuple(i + shift for i in ids), bool(own.get("sample_from_anchor")),
        whole_number(own, "draft_vocab_size", named) if own.get("draft_vocab_size") else None,
        causal_windows=shift == 0 and not own.get("sliding_window_non_causal", False),
        markov=whole_number(own, "markov_rank", named, least=0, default=0),
    )  # fmt: skip
