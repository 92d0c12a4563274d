"""GGUF files (llama.cpp's): each is converted once, by transformers, to a folder in the user's cache, in 16 bits.

From then on it is a checkpoint like any other. Quantised weights become their values, rounded to float16.
"""

import logging
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specbench.data.sources import PACKAGE, place_of
from specbench.errors import ConfigError, shown
from specbench.executors.machine import free_bytes
from specbench.models.architecture import loader_of
from specbench.models.checkpoint import LFS_POINTER, WHOLE, local_path, reading, short_message, weight_files
from specbench.models.checkpoint_checks import refuse_incomplete

log = logging.getLogger(__name__)
NEEDED = ("gguf", "accelerate", "psutil")  # accelerate needs the last one
TRANSFORMERS = (5, 18)  # the one before takes a file's begin of text for its end
# GGUF's names of tensors that are stored as transformers has them, and the ends of transformers' names.
AS_STORED = {"token_embd": "embed_tokens", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}  # fmt: skip
REORDERED = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"}  # the same rows, in another order
ROPE = "rope_freqs.weight"  # what Llama 3's rotary frequencies are divided by; transformers does not read it
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # of all published ones; their factors differ  # fmt: skip


def install(*wheels: str) -> str:
    """The command that installs wheels, and what is missing to read GGUF files."""
    return " ".join(["pip install --no-deps", *wheels, *(name for name in NEEDED if find_spec(name) is None)])


def check_gguf(key: str, path: str, revision: str | None) -> None:
    """Raises ConfigError, before anything loads, if the path is no GGUF file, or if it cannot be converted here."""
    file, why = Path(os.path.expanduser(place_of(path))), None
    if revision is not None:
        why = f"it has no revisions, but {key.rpartition('.')[0]}.revision={shown(revision)} is set"
    elif path.startswith(PACKAGE) and str(file) == path:
        why = "no such Python package is installed"
    else:
        why = _not_gguf(file)
    if why is not None:
        raise ConfigError(f"{key}={shown(path)} is not a GGUF file, whose name ends in .gguf: {why}")
    if not local_path(path).is_dir() and not all(map(find_spec, NEEDED)):
        raise ConfigError(f"{key}={shown(path)} needs packages that are not installed: {install()}")
    if not local_path(path).is_dir() and _transformers() < TRANSFORMERS:
        raise ConfigError(f"{key}={shown(path)} needs transformers {TRANSFORMERS[0]}.{TRANSFORMERS[1]} or newer, and "
                          f"{transformers.__version__} is installed")  # fmt: skip


def _transformers() -> tuple[int, ...]:
    return tuple(map(int, transformers.__version__.split(".")[:2]))


def _not_gguf(file: Path) -> str | None:
    """Why a file is none of this format, or cannot be read."""
    try:
        if not file.is_file():
            return "there is no such file"
        with file.open("rb") as opened:
            start = opened.read(len(LFS_POINTER))
    except OSError as error:
        return short_message(error)
    if start.startswith(b"GGUF"):
        return None
    return "it is a pointer of Git LFS" if start == LFS_POINTER else "it does not begin with GGUF"


def convert(key: str, path: str) -> None:
    """Converts a GGUF file to the folder `local_path(path)`, unless that is there. Raises ConfigError."""
    file, folder = Path(os.path.expanduser(place_of(path))), local_path(path)
    if folder.is_dir():
        return
    advice = f"repair the file, or give another {key}"
    with reading(key, path, "GGUF", advice):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"), TemporaryDirectory(dir=folder.parent) as temporary:
            if not folder.is_dir():  # another process may have made it meanwhile
                log.info("converting %s of %.3g GB, once", file, file.stat().st_size / 1e9)
                _write(file, Path(temporary, "model"), f"{key}={path}")
                os.replace(Path(temporary, "model"), folder)
                log.info("converted it to %s", folder)


def _write(file: Path, folder: Path, named: str) -> None:
    """Writes the model and the tokenizer of a GGUF file to a new folder. Raises ValueError or ConfigError."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    dtype = _dtype_of(tensors)
    _refuse_without_room(sum(int(t.n_elements) for t in tensors.values()) * dtype.itemsize, folder.parent, named)
    place, options = str(file.parent), {"gguf_file": file.name}
    config = transformers.AutoConfig.from_pretrained(place, **options)
    loader: Any = getattr(transformers, loader_of(config))
    whole: dict[str, Any] = {"dtype": dtype, **options, **WHOLE}
    if hasattr(transformers, "GgufConfig"):  # else it may keep the file's own blocks, for kernels of another package
        whole["quantization_config"] = transformers.GgufConfig(dequantize=True)
    module, info = loader.from_pretrained(place, **whole)
    refuse_incomplete(info, named)
    _restore_frequencies(module.config, tensors)
    module.hf_quantizer = None
    vars(module.config).pop("quantization_config", None)
    module.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(place, **options).save_pretrained(folder)
    _compare(folder, tensors)


def _refuse_without_room(needed: int, folder: Path, named: str) -> None:
    """Raises ConfigError if a conversion of so many bytes does not fit into memory, or onto the disk of a folder."""
    for free, where in (
        (free_bytes(torch.device("cpu")), "of memory"),
        (shutil.disk_usage(folder).free, "on the disk of the cache, which $SPECBENCH_CACHE may move"),
    ):
        if needed > free:
            raise ConfigError(
                f"{named} takes {needed / 1e9:.3g} GB to be converted, but {free / 1e9:.3g} GB are free {where}: "
                "give a smaller model, or free some"
            )


def _dtype_of(tensors: dict[str, Any]) -> torch.dtype:
    """float32 if all of the file's matrices are; bfloat16 if all others are; float16 if some are quantised."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds <= {"BF16", "F32"}:
        return torch.bfloat16 if "BF16" in kinds else torch.float32
    return torch.float16


def _values(tensor: Any) -> Tensor:
    """A tensor of a GGUF file, by the file format's own reader."""
    from gguf import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def _restore_frequencies(config: Any, tensors: dict[str, Any]) -> None:
    """Sets Llama 3's scaling of rotary frequencies, if the file has it. Raises ValueError if it is another one."""
    if ROPE not in tensors:
        return
    divisors = _values(tensors[ROPE])
    config.rope_parameters = {**config.rope_parameters, **LLAMA_3, "factor": float(divisors.max())}
    steps = torch.arange(0, 2 * len(divisors), 2) / (2 * len(divisors))
    wanted = config.rope_parameters["rope_theta"] ** -steps / divisors
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(found, wanted, rtol=1e-4, atol=0):
        raise ValueError(f"{ROPE} scales its rotary frequencies in a way that is not Llama 3's")


def _compare(folder: Path, tensors: dict[str, Any]) -> None:
    """Raises ValueError if a matrix of AS_STORED or REORDERED, of the first or last layer, or the embedding, is stored
    with other values than the file's own reader finds, rounded to its dtype, or if no layer can be compared."""
    last = max((int(name.split(".")[1]) for name in tensors if name.startswith("blk.")), default=0)
    ends = ("", *(f"layers.{layer}." for layer in {0, last}))
    pairs = {f"{end.replace('layers', 'blk')}{own}.weight": f"{end}{name}.weight"
             for end in ends for own, name in (AS_STORED | REORDERED).items()}  # fmt: skip
    compared = {"token_embd.weight"}
    for file in weight_files(folder):
        with safe_open(folder / file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                found = next((own for own, end in pairs.items() if own in tensors and name.endswith(f".{end}")), None)
                if found is None:
                    continue
                compared.add(found)
                values = stored.get_tensor(name)
                wanted = _values(tensors[found]).to(values.dtype).reshape(values.shape)
                if found.split(".")[-2] in REORDERED:
                    values, wanted = _ordered(values), _ordered(wanted)
                if not torch.equal(values, wanted):
                    raise ValueError(f"{found} was converted to other values than the file has")
    if len(compared) == 1:
        raise ValueError("the layers of its architecture have names by which they cannot be compared with the file")


def _ordered(matrix: Tensor) -> Tensor:
    """The rows of a matrix [out, in] in an order that follows from their values."""
    rows = matrix.contiguous().view(torch.uint8).numpy()
    return matrix[sorted(range(len(rows)), key=lambda row: rows[row].tobytes())]
