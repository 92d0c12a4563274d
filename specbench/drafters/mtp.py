"""Multi-token prediction: a module that comes with the checkpoint drafts (DeepSeek-V3, 2412.19437, section 2.2). It is
two norms, a projection, one decoder layer of the model's class, and a last norm. Embedding and output matrix are the
model's."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specbench.drafters.base import OwnSampling
from specbench.drafters.pair_model import PairDrafter, PairInput, PairModel
from specbench.drafters.tree_shapes import TreeSettings
from specbench.errors import ConfigError
from specbench.models import checkpoint
from specbench.models.heads import PartSettings
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context
from specbench.models.published import PARTS, mtp_place

MODULE = "multi-token-prediction module"
HIDDEN_FIRST = "model.mtp_layers."  # MiMo's projection reads the hidden state before the embedding
ADVICE = "choose a target that has one (DeepSeek-V3, GLM-4.5)"


class MtpDrafter(PairDrafter):
    """The module of the target's own checkpoint, or of another one."""

    class Settings(PartSettings, OwnSampling, TreeSettings):
        must: ClassVar[str] = checkpoint.MODEL
        path: str | None

    @classmethod
    def refuse_target(cls, settings: Any, target: Any) -> None:
        if settings.path is None and target.weights == "random":
            raise ConfigError("target.weights=random has no such module: choose target.weights=pretrained")
        key = "target.path" if settings.path is None else "drafter.path"
        if reason := missing_in(settings.path or target.path, key):
            raise ConfigError(f"drafter=mtp is not possible {reason}")

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "MtpDrafter":
        key = "target.path" if settings.path is None else "drafter.path"
        path = settings.path or target.name
        module = load_mtp(path, key, target)
        model = PairModel(module, target, f"{path}'s MTP module", settings.own(context).sampling, context.gamma)
        return cls(model, target.vocab_size, context.gamma, settings.tree_shape(model, target.sampling.greedy))


def missing_in(path: str, key: str) -> str | None:
    """Why a local folder has no module; None for hub ids, and what cannot be read, which another check refuses."""
    try:
        config = checkpoint.read_json(checkpoint.local_path(path) / "config.json")
        config = config.get("text_config") or config
        parts = _read(checkpoint.source_of(path), config["num_hidden_layers"])
    except Exception:
        return None
    return None if parts else f"with {key}={path}, which holds no {MODULE}: {ADVICE}"


def load_mtp(path: str, key: str, target: LanguageModel) -> PreTrainedModel:
    """The first module of a checkpoint as a model of the target's class with one layer, the target's embedding and
    output matrix, and a `pair_input`. Raises ConfigError if there is none for this target."""
    stock: Any = target.module
    named = f"{key}={path}"
    with checkpoint.reading(key, path, MODULE):
        source = checkpoint.source_of(path)
        config = type(stock.config).from_pretrained(source).get_text_config()
        parts = _read(source, config.num_hidden_layers)
        if not parts:
            raise ConfigError(f"{named} holds no {MODULE}: {ADVICE}")
        if config.hidden_size != target.config.hidden_size:
            sizes = f"{config.hidden_size}, but {target.name} has {target.config.hidden_size}"
            raise ConfigError(f"{named} has a {MODULE} for hidden states of {sizes}")
        if not all(tensor.is_floating_point() and tensor.element_size() > 1 for tensor in parts.values()):
            raise ConfigError(f"{named} holds its {MODULE} in 8 bits or less: only 16 and 32 bits can be read")
        module: Any = _built(parts, config, target, named)
    checkpoint.refuse_not_finite(module, named, target.dtype)
    module.set_input_embeddings(stock.get_input_embeddings())
    module.set_output_embeddings(stock.get_output_embeddings())
    return cast(PreTrainedModel, module)


def _read(source: str, layers: int) -> dict[str, Tensor]:
    """The tensors of the first module by their places, the projection's for the embedding first."""
    found: dict[str, Tensor] = {}
    for file in checkpoint.weight_files(source):
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
    kinds = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if experts else "dense"],
        "mlp_only_layers": [] if experts else [0],
        "first_k_dense_replace": 0 if experts else 1,
        "decoder_sparse_step": 1,
        "num_nextn_predict_layers": 0,
    }
    for name, value in kinds.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    return own


def _built(parts: Mapping[str, Tensor], config: PretrainedConfig, target: LanguageModel, named: str) -> PreTrainedModel:
    """The model with one layer from the tensors of a module, on the target's device. Raises ConfigError."""
    kind: Any = type(target.stock)
    layer = {place.removeprefix("layer."): tensor for place, tensor in parts.items() if place.startswith("layer.")}
    state = {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    state |= {f"model.{place}": tensor for place, tensor in parts.items() if place.startswith("norm.")}
    own = one_layer(config, experts=any(".experts." in name for name in layer))
    options: Any = {"config": own, "state_dict": state, "dtype": target.dtype, "attn_implementation": "sdpa"}
    module, info = kind.from_pretrained(None, **options, **checkpoint.WHOLE)
    H = config.hidden_size
    sizes = {f"{part}.weight": [H, 2 * H] if part == "projection" else [H] for part in PARTS}
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    missing = (set(info["missing_keys"]) - shared) | (sizes.keys() - parts.keys())
    shapes = {name: list(parts[name].shape) for name in sizes if name in parts}
    others = [(name, shape, sizes[name]) for name, shape in shapes.items() if shape != sizes[name]]
    info |= {"missing_keys": missing, "mismatched_keys": [*info["mismatched_keys"], *others]}
    checkpoint.refuse_incomplete(info, named)
    module.config.vocab_size = config.vocab_size
    module.pair_input = _pair_input(parts, module)
    loaded: PreTrainedModel = module.to(target.device).eval()
    return loaded


def _pair_input(parts: Mapping[str, Tensor], module: Any) -> PairInput:
    """Norms of the module's own class, and the projection, which may have a bias."""
    embedding_norm, hidden_norm = copy.deepcopy(module.model.norm), copy.deepcopy(module.model.norm)
    for name, norm in (("embedding_norm", embedding_norm), ("hidden_norm", hidden_norm)):
        norm.weight = nn.Parameter(parts[f"{name}.weight"].to(norm.weight))
    weight, bias = parts["projection.weight"], parts.get("projection.bias")
    projection = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    projection.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return PairInput(embedding_norm, hidden_norm, projection.to(module.dtype))
