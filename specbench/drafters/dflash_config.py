"""What the config.json of a DFlash checkpoint says: dialects of z-lab, speculators and DeepSpec, DSpark included."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import Qwen3Config

from specbench.errors import ConfigError
from specbench.models.checkpoint import reading
from specbench.models.published import checked, layer_config, read_config
from specbench.settings import BaseSettings

LARGEST_HEAD = 65_536
# What speculators writes and no draft needs: its own versions, and what tensors say of DSpark's estimate of acceptance.
NOT_USED = {"speculators_model_type", "speculators_version", "speculators_config", "target_hidden_size",
            "num_target_layers", "enable_confidence_head", "confidence_head_with_markov", "num_anchors"}  # fmt: skip


class Options(BaseSettings):
    """Keys of config.json beside those of the decoder layers, under one name each."""

    block_size: int = Field(ge=2, le=1000)
    mask_token_id: int = Field(ge=0)
    layer_ids: list[Annotated[int, Field(ge=0)]] | None = None
    draft_vocab_size: int | None = Field(default=None, ge=1)
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    use_swa: bool = False
    swa_window_size: int | None = Field(default=None, ge=1)
    causal: Literal[False] = False
    projector_type: Literal["dflash", "linear"] | None = None
    markov_rank: int = Field(default=0, ge=0)
    markov_head_type: Literal["vanilla"] = "vanilla"


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a DFlash drafter. `ids` are the target's layers in front of which hidden states are read, None the
    usual ones. With `causal_windows` rows of a block see earlier rows only, in layers with a sliding window."""

    layers: Qwen3Config
    options: Options
    ids: tuple[int, ...] | None
    causal_windows: bool

    @property
    def longest(self) -> int:
        """The most guesses of one draft: the last committed token's row may guess too."""
        return self.options.block_size - (not self.options.sample_from_anchor)

    def layers_of(self, total: int) -> tuple[int, ...]:
        """In front of which of a target's layers, `total` in all, hidden states are read."""
        count = self.layers.num_hidden_layers
        if self.ids is not None:
            return self.ids
        spread = [1 + i * (total - 4) / (count - 1) for i in range(count)] if count > 1 else [total // 2]
        return tuple(round(place) + 1 for place in spread)


def read_dflash(path: str, key: str) -> DFlashConfig:
    """The shape of a folder's or hub id's drafter. Raises ConfigError that names what is wrong or not known."""
    config = read_config(path, key)
    with reading(key, path, "config"):
        return parse_dflash(config, f"{key}={path}")


def parse_dflash(config: dict[str, Any], named: str) -> DFlashConfig:
    """The shape that the content of a config.json says; `named` is the checkpoint in errors. Raises ConfigError."""
    kind, classes = config.get("speculators_model_type"), config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ConfigError(f"{named} has architectures={classes} in its config.json: it must be a list of names")
    if config.get("quantization_config"):
        raise ConfigError(f"{named} has quantised weights: only 16 and 32 bits can be read")
    if kind is None and any(name.endswith("DSparkModel") for name in classes):  # DeepSpec, of DFlash too
        names = {*Options.model_fields, *NOT_USED, "target_layer_ids"}
        own = {"sample_from_anchor": True} | {name: value for name, value in config.items() if name in names}
        layers = {name: value for name, value in config.items() if name not in names}
        return _shape(own, "target_layer_ids", layers, named, shift=1)
    if kind is None:
        inner = config.get("dflash_config")
        if not isinstance(inner, dict):
            raise ConfigError(f"{named} is no DFlash checkpoint: its config.json has no dflash_config and no "
                              "speculators_model_type")  # fmt: skip
        own = {"block_size": config.get("block_size")} | inner
        layers = {n: v for n, v in config.items() if n not in ("dflash_config", "block_size", "num_target_layers")}
        return _shape(own, "target_layer_ids", layers, named, shift=1)
    if kind not in ("dflash", "dspark"):
        raise ConfigError(f"{named} has speculators_model_type={kind} in its config.json: it must be dflash or dspark")
    usual = {"sample_from_anchor": True, "markov_rank": 256} if kind == "dspark" else {}
    own = usual | {name: value for name, value in config.items() if name != "transformer_layer_config"}
    layers = config.get("transformer_layer_config", {})
    return _shape(own, "aux_hidden_state_layer_ids", layers, named, shift=0)


def _shape(own: dict[str, Any], ids: str, layers: Mapping[str, Any], named: str, shift: int) -> DFlashConfig:
    """The shape by what one dialect says; id i of a layer means the hidden states in front of layer i + shift."""
    own["layer_ids"] = own.pop(ids, None)
    options = checked(Options, {name: value for name, value in own.items() if name not in NOT_USED}, named)
    made: Any = layer_config(layers, {"qwen3": Qwen3Config}, named)
    if (made.head_dim or 0) > LARGEST_HEAD:  # angles have memory before a tensor is compared with it
        raise ConfigError(f"{named} has head_dim={made.head_dim} in its config.json: it must be <= {LARGEST_HEAD}")
    if options.use_swa:
        if options.swa_window_size is None:
            raise ConfigError(f"{named} has use_swa in its config.json, but no swa_window_size")
        made.sliding_window, made.layer_types = options.swa_window_size, ["sliding_attention"] * made.num_hidden_layers
    if "sliding_attention" in (made.layer_types or []) and made.sliding_window is None:
        raise ConfigError(f"{named} has layers of sliding_attention in its config.json, but no window: it needs "
                          "use_sliding_window and sliding_window")  # fmt: skip
    found = None if options.layer_ids is None else tuple(i + shift for i in options.layer_ids)
    return DFlashConfig(made, options, found, shift == 0 and not options.sliding_window_non_causal)


def refuse_other_target(config: DFlashConfig, named: str, target: str, text: Any) -> None:
    """Raises ConfigError if the drafter does not fit a target whose configuration is `text`."""
    total, own = text.num_hidden_layers, config.layers
    if own.hidden_size != text.hidden_size:
        raise ConfigError(f"{named} is for hidden states of {own.hidden_size}, but {target} has {text.hidden_size}")
    if bad := [layer for layer in config.layers_of(total) if not 0 <= layer <= total]:
        raise ConfigError(f"{named} reads hidden states in front of layer {bad[0]}, but {target} has {total} layers")
    if config.options.mask_token_id >= text.vocab_size:
        raise ConfigError(
            f"{named} has mask_token_id={config.options.mask_token_id}, but {target} has {text.vocab_size} tokens"
        )
