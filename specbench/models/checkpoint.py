"""The files of a checkpoint: where they are, what is wrong with them, and one sentence for any error in reading them.

Libraries raise errors of a dozen classes for a damaged file. `reading` is the one place where they become ConfigError.
"""

import functools
import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.utils._validators import validate_repo_id
from safetensors import safe_open

from specbench.data.sources import place_of
from specbench.errors import ConfigError, shown
from specbench.executors.machine import cache_dir, out_of_memory

log = logging.getLogger(__name__)
LONGEST_REASON = 240  # characters of a library's message
INDEX = {"model.safetensors": "model.safetensors.index.json", "pytorch_model.bin": "pytorch_model.bin.index.json"}
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
              "added_tokens.json", "preprocessor_config.json", "processor_config.json", *INDEX.values())  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # dtypes of weights, as safetensors names them
MODEL = "a model, which must be a hub id or a folder with a config.json"
TRAINED = "what python -m specbench.train makes, which must be a hub id or a folder with a config.json"
# Tensors that do not fit are told to us, and refused by name.
WHOLE = {"output_loading_info": True, "ignore_mismatched_sizes": True}
PICKLES = (".bin", ".pt")
GGUF, CONVERSION = ".gguf", 2  # the version of what models/gguf.py writes
LFS_POINTER = b"version https://git-lfs"
HUB_SECONDS = 10.0  # that the hub may take to say how large files are


def local_path(path: str) -> Path:
    """The path of a folder; `shipped:NAME` is a model that comes with specbench, FILE.gguf the folder that it is
    converted to."""
    place = Path(os.path.expanduser(place_of(path)))
    return conversion_of(place) if path.endswith(GGUF) else place


def conversion_of(file: Path) -> Path:
    """Where the conversion of a GGUF file lies: it depends on the file's path, size and time of change."""
    try:
        found = file.stat()
    except (OSError, ValueError):
        return file
    known = f"{CONVERSION} {file.resolve()} {found.st_size} {found.st_mtime_ns}"
    return cache_dir() / "gguf" / f"{file.stem}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"


def source_of(path: str) -> str:
    """What the libraries are given: the folder if there is one, else the hub id."""
    folder = local_path(path)
    return str(folder) if folder.is_dir() else path


def check_path(key: str, path: str, revision: str | None = None, must: str = MODEL) -> None:
    """Raises ConfigError, before anything loads, if the path can be neither a folder with a config.json nor a hub id,
    or if a folder is given with a revision. `must` says what is wanted."""
    folder, why = local_path(path), None
    looks_local = path.startswith((".", "/", "~", "shipped:")) or path.count("/") > 1
    try:
        if path and folder.is_dir():
            if not (folder / "config.json").is_file():
                why = f"it has no config.json, only {found}" if (found := names_in(folder)) else "it is empty"
        elif folder.is_file():
            why = "it is a file, give its folder"
        elif looks_local:
            why = "there is no such folder"
        else:
            validate_repo_id(path)
    except (OSError, ValueError) as error:  # no name of a file, or no hub id
        why = short_message(error)
    if why is not None:
        raise ConfigError(f"{key}={shown(path)} is not {must}: {why}")
    if revision is not None and folder.is_dir():
        setting = f"{key.rpartition('.')[0]}.revision"
        raise ConfigError(
            f"{setting}={shown(revision)} is not possible: {key}={shown(path)} is a folder, which has no revisions"
        )


@contextmanager
def reading(key: str, path: str, what: str, advice: str | None = None, trusts: bool = False) -> Iterator[None]:
    """Turns whatever a library raises inside this context into a ConfigError that names the key, the path, `what` is
    read of it and the reason, and ends with `advice`. `trusts` says whether the checkpoint's own code may run. What
    the libraries warn of is refused or harmless, and not shown."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the panics of tokenizers are no Exception
        raise ConfigError(_sentence(error, key, path, what, advice, trusts)) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def _sentence(error: BaseException, key: str, path: str, what: str, advice: str | None, trusts: bool) -> str:
    reason = short_message(error)
    if out_of_memory(error):
        return f"{key}={path} does not fit into memory ({reason}): use a smaller model, dtype=bfloat16 or a GPU"
    if "trust_remote_code" in str(error) and not trusts:
        setting = f"{key.rpartition('.')[0]}.trust_remote_code"
        return f"{key}={path} needs Python code of its own: {setting}=true runs it, if you trust its authors"
    role = key.rpartition(".")[0]
    if advice is None and local_path(path).is_dir():
        advice = f"repair the files in that folder, or give another {key}"
    advice = advice or (
        f"either log in with `hf auth login` to an account that has been granted access, or download the model and "
        f"give {key}=FOLDER, or time its real shape without weights with {role}.weights=random"
    )
    return f"{key}={path} could not be loaded ({what}: {reason}): {advice}"


def short_message(error: BaseException) -> str:
    """A library's message as one line, cut between words, with the error's class where the text says little."""
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError, ImportError)) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(text) > LONGEST_REASON:
        return f"{text[: LONGEST_REASON + 1].rpartition(' ')[0] or text[:LONGEST_REASON]} ..."
    return text.rstrip(".:")


def has_tokenizer(folder: Path) -> bool:
    """Whether a file of a folder may be that of a tokenizer: tokenizer.json, vocab.txt, spiece.model, ..."""
    return any(part in entry.name for entry in folder.iterdir() for part in ("token", "vocab", ".model", "tekken"))


def names_in(folder: Path) -> str:
    """The names of a folder's files, as text; "" if it is empty."""
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError that names the file."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file.name} is not a file")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {short_message(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} holds {type(found).__name__}, not an object")
    return found


def check_files(folder: Path) -> None:
    """Reads the JSON files of a local checkpoint. Raises ValueError or OSError that names the first bad one."""
    found = {name: read_json(folder / name) for name in JSON_FILES if (folder / name).exists()}
    if not isinstance(found["config.json"].get("model_type"), str):
        raise ValueError("config.json names no model_type")
    if (folder / "adapter_config.json").exists():
        raise ValueError("adapter_config.json says that it is an adapter: merge it into its model first")


def check_weights(folder: Path, quantized: bool, files: Sequence[str] = ()) -> None:
    """Reads the headers of a local checkpoint's weight files, or of `files`. Raises ValueError or OSError that names
    the first bad one, or a weight of whole numbers without scales in a checkpoint that is not `quantized`."""
    for name in files or weight_files(folder):
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{name} is not there, but the index names it")
        with file.open("rb") as opened:
            start = opened.read(len(LFS_POINTER))
        if not start:
            raise ValueError(f"{name} is empty")
        if start == LFS_POINTER:
            raise ValueError(f"{name} is a pointer of Git LFS: fetch the weights with git lfs pull")
        try:
            floats = _are_floats(file)
        except Exception as error:  # what torch says of a pickle advises to run it
            pickled = "it is no pickle of tensors alone, and was not run"
            why = pickled if name.endswith(PICKLES) else short_message(error)
            raise ValueError(f"{name} is damaged: {why}") from error
        whole = [name for name, is_float in floats.items() if name.endswith("weight") and not is_float]
        if whole and not quantized:
            raise ValueError(f"{whole[0]} in {name} is not of floating point, but config.json has no quantization")


def weight_files(folder: Path) -> list[str]:
    """The names of the files that transformers reads weights from. Raises ValueError if there are none."""
    for whole, index in INDEX.items():
        if (folder / whole).exists():
            return [whole]
        if (folder / index).exists():
            shards = read_json(folder / index).get("weight_map")
            if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
                raise ValueError(f"{index} has no weight_map from tensors to files")
            return sorted(set(shards.values()))
    raise ValueError(f"it has no weights, {' or '.join(INDEX)}: it holds {names_in(folder)}")


def weight_bytes(source: str, revision: str | None) -> int | None:
    """Bytes of the files that transformers reads weights from: of a folder, or of a hub id, in the local cache or as
    the hub says; None if nobody can tell. Raises ValueError for a folder without weights."""
    if Path(source).is_dir():
        return _bytes_in(Path(source))
    config = try_to_load_from_cache(source, "config.json", revision=revision)
    with suppress(OSError, ValueError):  # they are not there yet
        if isinstance(config, str):
            return _bytes_in(Path(config).parent)
    return hub_bytes(source, revision)


@functools.cache
def hub_bytes(source: str, revision: str | None) -> int | None:
    """`weight_bytes` of a hub id, as the hub says: asked once, whatever number of ways is estimated."""
    try:
        info = HfApi().model_info(source, revision=revision, files_metadata=True, timeout=HUB_SECONDS)
    except Exception as error:  # without a network, say
        log.info("the hub does not say how large %s is: %s", source, short_message(error))
        return None
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    for whole in INDEX:
        stem, _, kind = whole.partition(".")
        shards = [name for name in sizes if re.fullmatch(rf"{stem}-\d+-of-\d+\.{kind}", name)]
        found = [sizes[name] for name in ([whole] if whole in sizes else shards)]
        if found and None not in found:
            return sum(size for size in found if size)
    return None


def _bytes_in(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in weight_files(folder))


def _are_floats(file: Path) -> dict[str, bool]:
    """Whether each tensor of a file is of floating point; reads no values, and runs nothing of a pickle."""
    if file.suffix in PICKLES:
        state = torch.load(file, map_location="meta", weights_only=True)
        return {name: tensor.is_floating_point() for name, tensor in state.items()}
    with safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_slice(name).get_dtype() in FLOATS for name in tensors.keys()}  # noqa: SIM118
