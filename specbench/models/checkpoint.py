"""Where the files of a checkpoint are, one sentence for any error in them, and checks that all tensors are finite."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.utils._validators import validate_repo_id
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from specbench.errors import AbsentError, ConfigError, shown
from specbench.executors.machine import cache_dir, out_of_memory
from specbench.models.hub import hub_answers
from specbench.models.sizes import plain_parts
from specbench.settings import place_of

LONGEST_REASON = 240  # characters of a library's message
INDEX = {"model.safetensors": "model.safetensors.index.json", "pytorch_model.bin": "pytorch_model.bin.index.json"}
MODEL = "a model, which must be a hub id or a folder with a config.json"
TRAINED = "what python -m specbench.train makes, which must be a hub id or a folder with a config.json"
# Tensors that do not fit are listed, and refused by name.
WHOLE = {"output_loading_info": True, "ignore_mismatched_sizes": True}
GGUF, CONVERSION = ".gguf", 2  # the version of what models/gguf.py writes
NAMED = 3  # tensors that an error names


def local_path(path: str) -> Path:
    """The path of a folder; `shipped:NAME` comes with specbench, FILE.gguf is the folder that it is converted to."""
    place = Path(os.path.expanduser(place_of(path)))
    if not path.endswith(GGUF) or not place.is_file():
        return place
    found = place.stat()
    known = f"{CONVERSION} {place.resolve()} {found.st_size} {found.st_mtime_ns}"
    return cache_dir() / "gguf" / f"{place.stem}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"


def source_of(path: str) -> str:
    """What the libraries are given: the folder if there is one, else the hub id."""
    folder = local_path(path)
    if folder.is_dir():
        return str(folder)
    hub_answers()
    return path


def check_path(key: str, path: str, revision: str | None = None, must: str = MODEL) -> None:
    """Raises ConfigError, before anything loads, if the path can be neither a folder with a config.json nor a hub id,
    or if a folder is given with a revision. `must` says what is wanted."""
    folder, why = local_path(path), None
    if path and folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            why = "it is a PEFT adapter, which must be merged with its base and saved first"
        elif not (folder / "config.json").is_file():
            why = "it has no config.json"
        elif revision is not None:
            why = f"it is a folder, which has no {key.rpartition('.')[0]}.revision={shown(revision)}"
    elif path.startswith((".", "/", "~", "shipped:")) or path.count("/") > 1:
        why = "there is no such folder"
    else:
        try:
            validate_repo_id(path)
        except ValueError as error:
            why = short_message(error)
    if why is not None:
        raise AbsentError(f"{key}={shown(path)} is not {must}: {why}")


@contextmanager
def reading(key: str, path: str, what: str, advice: str | None = None) -> Iterator[None]:
    """Turns whatever a library raises inside this context into a ConfigError that names the key, the path, `what` is
    read of it and the reason, and ends with `advice`. Warnings, of what is refused or harmless, are not shown."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the panics of tokenizers are no Exception
        role = key.rpartition(".")[0]
        if out_of_memory(error):
            advice = "use a smaller model, dtype=bfloat16 or a GPU"
        elif "trust_remote_code" in str(error):
            advice = f"{role}.trust_remote_code=true runs its own code, if you trust its authors"
        elif isinstance(error, ImportError):
            advice = "install what is missing"
        elif advice is None and local_path(path).is_dir():
            advice = f"repair the files in that folder, or give another {key}"
        elif advice is None and not hub_answers():
            advice = f"connect to {constants.ENDPOINT}, or download it elsewhere and give {key}=FOLDER"
        elif advice is None:
            advice = (
                "log in with `hf auth login` to an account that has been granted access, or download the model and "
                f"give {key}=FOLDER, or time its shape without weights with {role}.weights=random"
            )
        reason = short_message(error)
        raise ConfigError(f"{key}={path} could not be loaded ({what}: {reason}): {advice}") from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def short_message(error: BaseException) -> str:
    """A library's message as one line, cut between words, with the error's class where the text says little."""
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError, ImportError)) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(text) > LONGEST_REASON:
        return f"{text[: LONGEST_REASON + 1].rpartition(' ')[0] or text[:LONGEST_REASON]} ..."
    return text.rstrip(".:")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError that names the file, or OSError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {short_message(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds {type(found).__name__}, not an object")
    return found


def weight_files(path: str, revision: str | None = None, first: Iterable[str] = ()) -> list[str]:
    """The weight files of a folder or hub id: the first of the names `first`, else transformers'. Raises OSError."""
    source = source_of(path)
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    for name in (*first, *INDEX):
        if (file := cached_file(source, name, **options)) is not None:
            return [file]
        if name in INDEX and (index := cached_file(source, INDEX[name], **options)) is not None:
            shards = set(read_json(Path(index))["weight_map"].values())
            return [str(cached_file(source, shard, revision=revision)) for shard in sorted(shards)]
    raise OSError(f"it has no weights, {' or '.join(INDEX)}")


def bytes_of_files(path: str, revision: str | None = None, first: Iterable[str] = ()) -> int:
    """The size of `weight_files`. Raises OSError."""
    return sum(Path(file).stat().st_size for file in weight_files(path, revision, first))


def refuse_incomplete(info: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError if tensors are missing, unexpected or of another shape, by transformers' loading info."""
    others = [f"{name} {list(stored)} for {list(wanted)}" for name, stored, wanted in info["mismatched_keys"]]
    wrong = {
        "lacks": info["missing_keys"],
        "holds what its config has no place for:": info["unexpected_keys"],
        "has other shapes than its config says:": others,
    }
    found = [f"{what} {few(names)}" for what, names in wrong.items() if names]
    found += [str(message) for message in info["error_msgs"]]
    if found:
        raise ConfigError(f"{key} {'; it '.join(found)}: its weights and its config.json must agree")


def few(names: Iterable[str]) -> str:
    """The first names and the number of the others: "a, b, c and 5 more"."""
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + more


def refuse_not_finite(module: nn.Module, key: str, dtype: torch.dtype) -> None:
    """Raises ConfigError if a weight is NaN or infinite in the run's dtype."""
    weights = module.state_dict(keep_vars=True).items()
    if bad := [name for name, weight in weights if not all(map(_is_finite, plain_parts(weight.detach())))]:
        advice = "repair it" if dtype == torch.float32 else "use dtype=float32, or repair it"
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{key} has weights that are not finite in {kind}, in {few(bad)}: {advice}")


def _is_finite(part: Tensor) -> bool:
    """Whether all numbers of a tensor are finite. Its extremes are NaN if one is: no second tensor of its size."""
    if not part.is_floating_point() or not part.numel():
        return True
    wide = part.float() if part.element_size() == 1 else part
    return bool(torch.stack(wide.aminmax()).isfinite().all())
