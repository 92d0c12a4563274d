"""Draft networks in formats of other projects: their config.json, their tensors, and the target that they are for; and
modules of multi-token prediction in checkpoints of models."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import load_state_dict
from transformers.utils.hub import cached_file

from specbench.errors import ConfigError
from specbench.models import checkpoint
from specbench.models.language_model import LanguageModel
from specbench.settings import Schema, validate

# Keys of config.json that are not used: any model's, those of other ways to draft, and what the tensors say.
UNUSED = {*PretrainedConfig().to_dict(), "auto_map", "torch_dtype", "quantization_config", "_attn_implementation",
          "attn_implementation", "has_no_defaults_at_init", "use_cache", "tie_word_embeddings", "pad_token_id",
          "bos_token_id", "eos_token_id", "base_model_name_or_path", "version", "max_paths", "topk", "max_seq_len",
          "medusa_fc_bias", "proj_dim", "num_lookahead_tokens", "top_k_tokens_per_head", "n_candidates"}  # fmt: skip
# Names of multi-token-prediction modules, whose tensors transformers leaves out when it loads a model: of a layer
# behind the last one (DeepSeek-V3, GLM-4.5), of a part of its own, `mtp` (Qwen3-Next, Qwen3.5), and of `mtp_layers`
# (MiMo).
PARTS = ("embedding_norm", "hidden_norm", "projection", "norm")
NAMES = {
    "enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "shared_head.norm": "norm",
    "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm", "input_proj": "projection",
    "final_layernorm": "norm", "mtp.pre_fc_norm_embedding": "embedding_norm", "mtp.pre_fc_norm_hidden": "hidden_norm",
    "mtp.fc": "projection", "mtp.norm": "norm",
}  # fmt: skip
SHARED = ("shared_head.head", "embed_tokens")  # copies of the target's matrices


def read_config(path: str, key: str) -> dict[str, Any]:
    """The config.json of a folder or hub id. Raises ConfigError."""
    with checkpoint.reading(key, path, "config"):
        return checkpoint.read_json(Path(cached_file(checkpoint.source_of(path), "config.json") or ""))


def checked(schema: type[Schema], config: Mapping[str, Any], named: str) -> Schema:
    """The keys of a config.json that are used. Raises ConfigError, also if there are others."""
    own = {name: value for name, value in config.items() if name not in UNUSED}
    if "${" in json.dumps(own):
        raise ConfigError(f"{named} has ${{ in its config.json, which would be replaced by what it names")
    return validate(schema, OmegaConf.create(own), f"{named}: config.json ")


def layer_config(values: Mapping[str, Any], kinds: Mapping[str, Any], named: str) -> PretrainedConfig:
    """The configuration of decoder layers: `kinds` are the classes by model_type, the first one's where none is given.
    Raises ConfigError, also if there are keys that no such layer has."""
    kind = values.get("model_type", next(iter(kinds)))
    if kind not in kinds:
        raise ConfigError(f"{named} has layers of model_type={kind}: it must be {' or '.join(kinds)}")
    known = {*kinds[kind]().to_dict(), *UNUSED, "rope_theta", "rope_scaling"}
    if other := [name for name in values if name not in known]:
        raise ConfigError(f"{named} has {checkpoint.few(other)} in its config.json, which no {kind} layer has")
    made: PretrainedConfig = kinds[kind](**{name: value for name, value in values.items() if name != "model_type"})
    return made


def read_tensors(path: str, key: str, first: Sequence[str] = ()) -> dict[str, Tensor]:
    """The tensors of a folder or hub id: of the file of the names `first` that is there, else of the usual ones. Files
    are mapped: values are read where they are used. Nothing of a pickle runs. Raises ConfigError."""
    with checkpoint.reading(key, path, "weights"):
        files = checkpoint.weight_files(path, first=first)
        return {name: tensor for file in files for name, tensor in load_state_dict(file).items()}


def fill_module(module: nn.Module, tensors: Mapping[str, Tensor], named: str) -> None:
    """Gives a module on "meta" the tensors of its names. Raises ConfigError if names or shapes are others."""
    refuse_others(module.state_dict(), tensors, named)
    module.load_state_dict(tensors, assign=True)


def refuse_others(
    own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], named: str, optional: Collection[str] = ()
) -> None:
    """Raises ConfigError if tensors are not a module's `own` by name and shape; `optional` ones may be missing."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: list(tensor.shape) for name, tensor in own.items()}
    others = [(name, shape, wanted[name]) for name, shape in shapes.items() if shape != wanted.get(name, shape)]
    missing = wanted.keys() - shapes.keys() - {*optional}
    checkpoint.refuse_incomplete({"missing_keys": missing, "unexpected_keys": shapes.keys() - wanted.keys(),
                       "mismatched_keys": others, "error_msgs": []}, named)  # fmt: skip


def place(module: nn.Module, named: str, target: LanguageModel) -> None:
    """Moves weights to the target's device and dtype. Raises ConfigError if one is not finite there."""
    module.to(target.device, target.dtype).eval().requires_grad_(False)
    checkpoint.refuse_not_finite(module, named, target.dtype)


def targets_of(found: Mapping[str, Tensor], small: int, V: int) -> Tensor | None:
    """The target's token [V'] for each of the `small` tokens that a draft model predicts, of V, by d2t, which holds
    their differences; None if they are the same tokens. Raises ValueError."""
    if "d2t" not in found:
        if small != V:
            raise ValueError(f"it has no d2t, but a draft vocabulary of {small} of {V} tokens")
        return None
    d2t = found["d2t"]
    if d2t.shape != (small,) or d2t.is_floating_point():
        raise ValueError(f"d2t is {list(d2t.shape)} of {d2t.dtype}, and must be {small} integers")
    targets = torch.arange(small) + d2t.long()
    least, most = int(targets.min()), int(targets.max())
    if least < 0 or most >= V:
        raise ValueError(f"d2t names tokens from {least} to {most}, which must be from 0 to {V - 1}")
    if len(targets.unique()) < small:
        raise ValueError("d2t names a token twice")
    if small == V and not d2t.any():  # the same tokens, which the target may pad to another number
        return None
    mask = found.get("t2d")
    if mask is not None and not (mask.shape == (V,) and mask.sum() == small and mask.bool()[targets].all()):
        raise ValueError("t2d marks other tokens than d2t names: d2t must hold differences")
    return targets


def mtp_place(name: str, layers: int) -> tuple[int, str] | None:
    """The number of the module that a tensor of a checkpoint with so many `layers` belongs to, and its place there:
    "PART.weight" for one of PARTS, "layer.REST", or "" for a copy of the target's matrices. None if it belongs to the
    model itself."""
    number, rest = 0, name
    if found := re.fullmatch(r"(model\.layers|model\.mtp_layers|mtp\.layers)\.(\d+)\.(.+)", name):
        number, rest = int(found[2]) - (layers if found[1] == "model.layers" else 0), found[3]
    elif not name.startswith("mtp."):
        return None
    if number < 0:
        return None
    part, _, kind = rest.rpartition(".")
    if part.removeprefix("mtp.") in SHARED:
        return number, ""
    return number, f"{NAMES[part]}.{kind}" if part in NAMES else f"layer.{rest.removeprefix('mtp.')}"


def without_modules(names: Iterable[str], layers: int) -> list[str]:
    """The names that belong to no module: a layer behind the last one is one only if it has a projection."""
    places = {name: mtp_place(name, layers) for name in names}
    modules = {place[0] for place in places.values() if place is not None and place[1] == "projection.weight"}
    return [name for name, place in places.items() if place is None or place[0] not in modules]
