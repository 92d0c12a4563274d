"""A tiny target, and a checkpoint for it of every kind that others publish: its folder's config.json and tensors."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from checkpoints import WEIGHTS, checkpoint
from dflash_cases import KINDS, random_weights
from eagle_cases import D, V, eagle3_tensors, numbers, speculators
from safetensors.torch import save_file

LAYERS = 8
Checkpoint = tuple[dict[str, Any], dict[str, torch.Tensor]]


@cache
def target() -> Path:
    return checkpoint(Path(mkdtemp()), num_hidden_layers=LAYERS, initializer_range=0.3)


def filled(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: numbers(name, *shape) for name, shape in shapes.items()}


def eagle3() -> Checkpoint:
    tensors = eagle3_tensors(without={"embedding"})
    return speculators(tensors), tensors


def dflash(kind: str = "speculators") -> Checkpoint:
    config, fewer, rank = KINDS[kind]
    return config, random_weights(fewer, rank)


def medusa() -> Checkpoint:
    """Two heads of one layer, under FasterDecoding's names."""
    shapes = {f"{head}.{name}": shape for head in range(2) for name, shape in
              (("0.linear.weight", (D, D)), ("0.linear.bias", (D,)), ("1.weight", (V, D)))}  # fmt: skip
    return {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "one"}, filled(shapes)


def mtp() -> Checkpoint:
    """Behind the target's last layer, as DeepSeek-V3 has it."""
    config = json.loads((target() / "config.json").read_text())
    own = f"model.layers.{LAYERS}"
    D, H, K, inner = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads",
                                                "intermediate_size"))  # fmt: skip
    size = D // H
    shapes = {f"{own}.self_attn.{name}_proj.weight": shape for name, shape in
              (("q", (D, D)), ("k", (K * size, D)), ("v", (K * size, D)), ("o", (D, D)))}  # fmt: skip
    shapes |= {f"{own}.mlp.{name}_proj.weight": (inner, D) for name in ("gate", "up")}
    shapes |= {f"{own}.mlp.down_proj.weight": (D, inner), f"{own}.eh_proj.weight": (D, 2 * D)}
    norms = ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm")
    return config, filled(shapes | {f"{own}.{name}.weight": (D,) for name in norms})


CHECKPOINTS: dict[str, Callable[[], Checkpoint]] = {
    "eagle3": eagle3, "dflash": dflash, "medusa": medusa, "mtp": mtp,
}  # fmt: skip


def written(kind: str, folder: Path, change: Callable[..., Any] = lambda config, tensors: None) -> list[str]:
    """Overrides of a run with a checkpoint that is written into a folder, after a change of what it holds."""
    config, tensors = CHECKPOINTS[kind]()
    config = dict(config)
    change(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "medusa":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return ["target=model", f"target.path={target()}", f"drafter={kind}", f"drafter.path={folder}"]
