"""Multi-token-prediction modules in checkpoints: where their tensors are, and what their names mean.

transformers leaves these tensors out when it loads a model. Known are names of a layer behind the last one
(DeepSeek-V3, GLM-4.5), and of a part of its own: `mtp` (Qwen3-Next, Qwen3.5) or `mtp_layers` (MiMo; a folder that
speculators wrote). All hold two norms, a projection, one decoder layer of the model's class, and a last norm; embedding
and output matrix are the model's.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specbench.errors import ConfigError
from specbench.models.checkpoint import (
    WHOLE,
    local_path,
    read_json,
    reading,
    refuse_incomplete,
    refuse_not_finite,
    source_of,
    weight_files,
)
from specbench.models.language_model import LanguageModel
from specbench.models.mtp import PairInput
from specbench.models.published import read_config

PART = "multi-token-prediction module"
LAYERS = "transformer_layer_config"  # of a config.json of speculators
PARTS = ("embedding_norm", "hidden_norm", "projection", "norm")
LAYER = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "shared_head.norm": "norm",
         "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm", "input_proj": "projection",
         "final_layernorm": "norm"}  # fmt: skip
OWN = {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "projection",
       "norm": "norm"}  # fmt: skip
SHARED = ("shared_head.head", "embed_tokens")  # copies of the target's matrices
HIDDEN_FIRST = "model.mtp_layers."  # MiMo's projection reads the hidden state before the embedding
ADVICE = "choose a target that has one (DeepSeek-V3, GLM-4.5)"


def mtp_place(name: str, layers: int) -> tuple[int, str] | None:
    """The number of the module that a tensor of a checkpoint with so many `layers` belongs to, and its place there:
    "PART.weight" for one of PARTS, "layer.REST", or "" for a copy of the target's matrices. None if it belongs to the
    model itself."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        number = int(found[1]) - layers
        return None if number < 0 else (number, _within(LAYER, found[2]))
    if found := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
        return int(found[1]), f"layer.{found[2]}"
    if found := re.fullmatch(r"mtp\.(.+)", name):
        return 0, _within(OWN, found[1])
    if found := re.fullmatch(r"(?:model\.)?mtp_layers\.(\d+)\.(.+)", name):
        return int(found[1]), _within(LAYER, found[2])
    return None


def _within(names: Mapping[str, str], rest: str) -> str:
    part, _, kind = rest.rpartition(".")
    if part in SHARED:
        return ""
    return f"{names[part]}.{kind}" if part in names else f"layer.{rest}"


def without_modules(names: Iterable[str], layers: int) -> list[str]:
    """The names that belong to no module: a layer behind the last one is one only if it has a projection."""
    places = {name: mtp_place(name, layers) for name in names}
    modules = {place[0] for place in places.values() if place is not None and place[1] == "projection.weight"}
    return [name for name, place in places.items() if place is None or place[0] not in modules]


def missing_in(path: str, key: str) -> str | None:
    """Why no module can be read from a local folder, as `Component.refuses` says it; None for hub ids, and for folders
    that cannot be read, which another check refuses."""
    found = numbers_of(path)
    return None if found is None or found[0] else f"with {key}={path}, which holds no {PART}: {ADVICE}"


def numbers_of(path: str) -> tuple[int, int] | None:
    """How many numbers the first module in a local folder has, and its hidden size; None as in `missing_in`."""
    try:
        config = read_json(local_path(path) / "config.json")
        config = config.get("text_config") or config.get(LAYERS) or config
        parts = _read(source_of(path), config["num_hidden_layers"])
        return sum(tensor.numel() for tensor in parts.values()), config["hidden_size"]
    except Exception:
        return None


def load_mtp(path: str, key: str, target: LanguageModel) -> PreTrainedModel:
    """The first module of a checkpoint as a model of the target's class with one layer, the target's embedding and
    output matrix, and a `pair_input`. Raises ConfigError if there is none for this target."""
    stock: Any = target.module
    named = f"{key}={path}"
    with reading(key, path, PART):
        config = _config(read_config(path, key), source_of(path), target)
        parts = _read(source_of(path), config.num_hidden_layers)
        if not parts:
            raise ConfigError(f"{named} holds no {PART}: {ADVICE}")
        if config.hidden_size != target.config.hidden_size:
            sizes = f"{config.hidden_size}, but {target.name} has {target.config.hidden_size}"
            raise ConfigError(f"{named} has a {PART} for hidden states of {sizes}")
        if not all(tensor.is_floating_point() and tensor.element_size() > 1 for tensor in parts.values()):
            raise ConfigError(f"{named} holds its {PART} in 8 bits or less: only 16 and 32 bits can be read")
        module: Any = _built(parts, config, target, named)
    refuse_not_finite(module, named, target.dtype)
    module.set_input_embeddings(stock.get_input_embeddings())
    module.set_output_embeddings(stock.get_output_embeddings())
    return cast(PreTrainedModel, module)


def _config(given: Mapping[str, Any], source: str, target: LanguageModel) -> PretrainedConfig:
    """The shape of the model that a module is for, from the config.json that was given. Raises ValueError."""
    kind, layers, own = given.get("speculators_model_type"), given.get(LAYERS), target.config.model_type
    if kind is None:
        found: PretrainedConfig = type(target.module.config).from_pretrained(source).get_text_config()
        return found
    if kind != "mtp" or not isinstance(layers, dict) or layers.get("model_type", own) != own:
        raise ValueError(f"its speculators_model_type={kind} and {LAYERS} must be mtp and {own}")
    return type(target.config)(**layers)


def _read(source: str, layers: int) -> dict[str, Tensor]:
    """The tensors of the first module by their places, the projection's for the embedding first."""
    found: dict[str, Tensor] = {}
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                number, place = mtp_place(name, layers) or (None, "")
                if number == 0 and place:
                    tensor = tensors.get_tensor(name)
                    if place == "projection.weight" and name.startswith(HIDDEN_FIRST):
                        tensor = torch.cat(tensor.chunk(2, 1)[::-1], 1)
                    found[place] = tensor
    return found


def one_layer(config: PretrainedConfig, experts: bool) -> PretrainedConfig:
    """The shape of a model with one layer of full attention, with or without experts, and without an embedding."""
    own = copy.deepcopy(config)
    own.num_hidden_layers, own.vocab_size, own.pad_token_id, own.tie_word_embeddings = 1, 1, None, False
    kinds = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse" if experts else "dense"],
             "first_k_dense_replace": 0 if experts else 1, "decoder_sparse_step": 1,
             "mlp_only_layers": [] if experts else [0], "num_nextn_predict_layers": 0}  # fmt: skip
    for name, value in kinds.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    return own


def _built(parts: Mapping[str, Tensor], config: PretrainedConfig, target: LanguageModel, named: str) -> PreTrainedModel:
    """The model with one layer from the tensors of a module, on the target's device. Raises ConfigError."""
    kind: Any = type(target.stock_module())
    state = {f"model.layers.0.{place.removeprefix('layer.')}": t for place, t in parts.items() if "layer." in place[:6]}
    state |= {f"model.{place}": tensor for place, tensor in parts.items() if place.startswith("norm.")}
    own = one_layer(config, experts=any(".experts." in place for place in parts))
    options: Any = {"config": own, "state_dict": state, "dtype": target.dtype, "attn_implementation": "sdpa"}
    module, info = kind.from_pretrained(None, **options, **WHOLE)
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    H = config.hidden_size
    sizes = {f"{part}.weight": [H, 2 * H] if part == "projection" else [H] for part in PARTS}
    missing = (set(info["missing_keys"]) - shared) | (sizes.keys() - parts.keys())
    others = [(name, list(parts[name].shape), size) for name, size in sizes.items()
              if name in parts and list(parts[name].shape) != size]  # fmt: skip
    refuse_incomplete(info | {"missing_keys": missing, "mismatched_keys": [*info["mismatched_keys"], *others]}, named)
    module.config.vocab_size = config.vocab_size
    module.pair_input = _pair_input(parts, module)
    loaded: PreTrainedModel = module.to(target.device).eval()
    return loaded


def _pair_input(parts: Mapping[str, Tensor], module: Any) -> PairInput:
    """Norms of the module's own class, and the projection, which may have a bias."""
    norms = [copy.deepcopy(module.model.norm) for _ in PARTS[:2]]
    for name, norm in zip(PARTS, norms, strict=False):
        norm.weight = nn.Parameter(parts[f"{name}.weight"].to(norm.weight))
    weight, bias = parts["projection.weight"], parts.get("projection.bias")
    projection = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    projection.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return PairInput(norms[0], norms[1], projection.to(module.dtype))
