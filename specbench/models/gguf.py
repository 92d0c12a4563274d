"""GGUF files (llama.cpp's): transformers reads one once and writes it as a checkpoint to a folder in the user's cache.

Quantised weights become their values, rounded to float16.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from filelock import FileLock

from specbench.errors import ConfigError
from specbench.models.checkpoint import WHOLE, local_path, reading, refuse_incomplete
from specbench.settings import place_of

NEEDED = ("gguf", "accelerate", "psutil")  # accelerate needs the last one
ROPE = "rope_freqs.weight"  # Llama 3's scaling of rotary frequencies, which transformers does not read


def install(*wheels: str) -> str:
    """The command that installs wheels, and what is missing to read GGUF files."""
    return " ".join(["pip install --no-deps", *wheels, *(name for name in NEEDED if find_spec(name) is None)])


def convert(key: str, path: str) -> None:
    """Converts a GGUF file to the folder `local_path(path)`, unless that is there. Raises ConfigError."""
    file, folder = Path(os.path.expanduser(place_of(path))), local_path(path)
    if not file.is_file():
        raise ConfigError(f"{key}={path} is not a GGUF file: there is no such file, or no such package is installed")
    if folder.is_dir():
        return
    if not all(map(find_spec, NEEDED)):
        raise ConfigError(f"{key}={path} needs packages that are not installed: {install()}")
    with reading(key, path, "GGUF", f"repair the file, or give another {key}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"), TemporaryDirectory(dir=folder.parent) as temporary:
            if not folder.is_dir():  # another process may have made it meanwhile
                _write(file, Path(temporary, "model"), f"{key}={path}")
                os.replace(Path(temporary, "model"), folder)


def _write(file: Path, folder: Path, named: str) -> None:
    """Writes the model and the tokenizer of a GGUF file to a new folder. Raises ValueError or ConfigError."""
    from gguf import GGUFReader

    tensors = GGUFReader(file).tensors
    if any(tensor.name == ROPE for tensor in tensors):
        raise ValueError(f"its rotary frequencies are scaled by {ROPE}, which transformers does not read")
    options: dict[str, Any] = {"gguf_file": file.name}
    kinds = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    quantised = not kinds <= {"BF16", "F32"}
    dtype = torch.float16 if quantised else torch.bfloat16 if "BF16" in kinds else torch.float32
    whole: dict[str, Any] = {"dtype": dtype, **options, **WHOLE}
    if "GgufConfig" in dir(transformers):  # else it may keep the file's own blocks, for kernels of another package
        whole["quantization_config"] = transformers.GgufConfig(dequantize=True)
    kind: Any = transformers.AutoModelForCausalLM
    module, info = kind.from_pretrained(str(file.parent), **whole)
    refuse_incomplete(info, named)
    module.hf_quantizer = None
    vars(module.config).pop("quantization_config", None)
    module.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(file.parent), **options).save_pretrained(folder)
