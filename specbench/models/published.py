"""Draft checkpoints in formats of other projects: their files, and checks of them before and after loading."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from specbench.component import Selections
from specbench.errors import ConfigError
from specbench.models import checkpoint
from specbench.models.checkpoint import INDEX, check_weights, local_path, read_json, source_of, weight_files
from specbench.models.checkpoint_checks import few, refuse_incomplete, refuse_not_finite
from specbench.models.language_model import LanguageModel

PUBLISHED = "a draft checkpoint, which must be a hub id or a folder with a config.json"
# Keys of any config.json, of transformers 4 and 5.
GENERAL = {*PretrainedConfig().to_dict(), "auto_map", "torch_dtype", "use_cache", "tie_word_embeddings", "pad_token_id",
           "bos_token_id", "eos_token_id", "base_model_name_or_path"}  # fmt: skip


def read_config(path: str, key: str) -> dict[str, Any]:
    """The config.json of a folder or hub id. Raises ConfigError."""
    with checkpoint.reading(key, path, "config"):
        return read_json(Path(cached_file(source_of(path), "config.json") or ""))


def read_tensors(path: str, key: str, own: Sequence[str] = (), values: bool = True) -> dict[str, Tensor]:
    """The tensors of a folder or hub id by name: of the first file of `own` that is there, else of the usual files.
    Without `values` they have shapes only ("meta"). Nothing of a pickle runs. Raises ConfigError."""
    with checkpoint.reading(key, path, "weights"):
        source, found = source_of(path), None
        for name in (*own, *INDEX, *INDEX.values()):
            found = found or cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        folder = local_path(path) if found is None else Path(found).parent
        files = [Path(found).name] if found and not found.endswith(".index.json") else weight_files(folder)
        if not local_path(path).is_dir():
            files = [str(cached_file(source, name)) for name in files]
        check_weights(folder, quantized=False, files=files)
        return {name: tensor for file in files for name, tensor in _tensors(folder / file, values).items()}


def _tensors(file: Path, values: bool) -> dict[str, Tensor]:
    if file.suffix in checkpoint.PICKLES:
        stored: dict[str, Tensor] = torch.load(file, map_location=None if values else "meta", weights_only=True)
        return stored
    with safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
        if values:
            return {name: opened.get_tensor(name) for name in names}
        return {name: torch.empty(opened.get_slice(name).get_shape(), device="meta") for name in names}


def refuse_unknown_keys(config: Mapping[str, Any], known: Collection[str], named: str) -> None:
    """Raises ConfigError if config.json has keys that are neither `known` nor general."""
    if unknown := config.keys() - {*known} - GENERAL:
        raise ConfigError(f"{named} has {few(unknown)} in its config.json, which this format does not have: it may be "
                          f"another format; known are {', '.join(sorted(known))}")  # fmt: skip


def whole_number(config: Mapping[str, Any], name: str, named: str, least: int = 1, default: int | None = None) -> int:
    """An integer from `least` to 2^31 in config.json. Raises ConfigError."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ConfigError(f"{named} has {name}={value} in its config.json: it must be an integer >= {least}")
    return value


def fill(module: nn.Module, tensors: Mapping[str, Tensor], named: str, file_name: Callable[[str], str] = str) -> None:
    """Gives a module on "meta" the tensors of these names. Raises ConfigError if names or shapes are others, with their
    names in the file."""
    own = {file_name(name): list(weight.shape) for name, weight in module.state_dict().items()}
    given = {file_name(name): list(tensor.shape) for name, tensor in tensors.items()}
    others = [(name, shape, own[name]) for name, shape in given.items() if shape != own.get(name, shape)]
    refuse_incomplete({"missing_keys": own.keys() - given.keys(), "unexpected_keys": given.keys() - own.keys(),
                       "mismatched_keys": others, "error_msgs": []}, named)  # fmt: skip
    module.load_state_dict(tensors, assign=True)


def place(module: nn.Module, named: str, target: LanguageModel) -> None:
    """Moves weights to the target's device and dtype. Raises ConfigError if one is not finite there."""
    module.to(target.device, target.dtype).eval().requires_grad_(False)
    refuse_not_finite(module, named, target.dtype)


def refuse_other_target(named: str, hidden: int, vocabulary: int, target: str, sizes: tuple[int, int]) -> None:
    """Raises ConfigError unless H and V are those of the target, `sizes`."""
    for what, own, theirs in (("hidden states", hidden, sizes[0]), ("a vocabulary", vocabulary, sizes[1])):
        if own != theirs:
            raise ConfigError(f"{named} is for {what} of {own}, but {target} has {theirs}: give one for this target")


def sizes_of(target: LanguageModel) -> tuple[int, int]:
    """H, the width of the output matrix's input, and V of a loaded target."""
    embedding: Any = target.module.get_input_embeddings()
    return embedding.weight.shape[1], target.vocab_size


def sizes_before(run: Selections) -> tuple[str, tuple[int, int]] | None:
    """Path, H and V of the chosen target by its config.json; None if it is not in a local folder with both."""
    try:
        path = run["target"].settings.path
        config = read_json(local_path(path) / "config.json")
        config = config.get("text_config") or config
        return path, (int(config["hidden_size"]), int(config["vocab_size"]))
    except Exception:
        return None
