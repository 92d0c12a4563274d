"""Medusa heads of others: logits by a plain implementation, and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import WEIGHTS, checkpoint, config, cut, tensors, without
from safetensors.torch import save_file
from small_runs import composed, parts_of, small

from specbench.config.build import build
from specbench.config.check import check
from specbench.errors import ConfigError
from specbench.models.heads import read_heads

HEADS, LAYERS, HIDDEN, VOCABULARY = 3, 2, 16, 24
PICKLE = "medusa_lm_head.pt"
HIDDEN_STATES = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
ORIGINAL = {"medusa_num_heads": 2, "medusa_num_layers": LAYERS, "base_model_name_or_path": "x/y",
            "transformers_version": "4.31.0"}  # fmt: skip


def random(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number)) / 3


def parts(hidden: int = HIDDEN, vocabulary: int = VOCABULARY):
    """L [K, layers, H, H], b [K, layers, H] and W [K, V, H]."""
    blocks = random(1, HEADS, LAYERS, hidden, hidden)
    return blocks, random(2, HEADS, LAYERS, hidden), random(3, HEADS, vocabulary, hidden)


def original(L, b, W, prefix: str = "") -> dict[str, torch.Tensor]:
    state = {f"{prefix}{k}.{LAYERS}.weight": W[k].clone() for k in range(HEADS)}
    for k in range(HEADS):
        for j in range(LAYERS):
            state[f"{prefix}{k}.{j}.linear.weight"] = L[k, j].clone()
            state[f"{prefix}{k}.{j}.linear.bias"] = b[k, j].clone()
    return state


def written(folder: Path, settings: dict, state: dict, file: str = WEIGHTS) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if file.endswith(".safetensors"):
        save_file(state, folder / file)
    else:
        torch.save(state, folder / file)
    return folder


def plain(L, b, W) -> np.ndarray:
    """Logits [B, K, V] of HIDDEN_STATES in float64: x + silu(L x + b) for each layer, then W x."""
    found = []
    for layers, biases, matrix in zip(L.double().numpy(), b.double().numpy(), W.double().numpy(), strict=True):
        x = HIDDEN_STATES.double().numpy()
        for layer, bias in zip(layers, biases, strict=True):
            z = x @ layer.T + bias
            x = x + z / (1 + np.exp(-z))
        found.append(x @ matrix.T)
    return np.stack(found, 1)


def of_folder(folder: Path, output: torch.nn.Module | None = None) -> np.ndarray:
    heads = read_heads(str(folder), "drafter.path")
    with torch.no_grad():
        return heads.logits(HIDDEN_STATES, heads.config.heads, output or torch.nn.Identity()).numpy()


def compared(found: np.ndarray, L, b, W) -> None:
    expected = plain(L, b, W)
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5
    assert np.abs(found[:, :-1] - expected[:, 1:]).max() > 0.1  # control: heads shifted by one


@pytest.mark.parametrize("file", [PICKLE, "medusa_lm_head.safetensors", "pytorch_model.bin"])
def test_the_original_format_has_as_many_heads_as_its_file(file, tmp_path):
    compared(of_folder(written(tmp_path / "h", ORIGINAL, original(*parts()), file)), *parts())


def test_merged_checkpoints_are_heads_and_target(tmp_path):
    """Of a whole model; the target loads from the same folder."""
    folder = checkpoint(tmp_path / "merged")
    L, b, W = parts(16, 4160)
    tensors(lambda state: state.update(original(L, b, W, "medusa_head.")))(folder)
    config(medusa_num_heads=HEADS, medusa_num_layers=LAYERS)(folder)
    compared(of_folder(folder), L, b, W)
    run = ["target=model", f"target.path={folder}", "drafter=medusa", f"drafter.path={folder}", "gamma=2"]
    assert build(check(composed(*small(*run)))).drafter.longest == HEADS


def of_24_tokens(state):
    state.update({name: weight[:24].clone() for name, weight in state.items() if name.endswith(".2.weight")})


def no_heads(state):
    state.clear()
    state["other.weight"] = torch.ones(1)


BAD = {
    "of fewer tokens": (tensors(of_24_tokens), "24 tokens, but"),
    "no heads": (tensors(no_heads), "holds no Medusa heads"),
    "no config": (without("config.json"), "it has no config.json"),
    "no weights": (without(WEIGHTS), "it has no weights"),
    "half of the file": (cut(WEIGHTS, 0.5), "could not be loaded"),
    "half of the tensors": (tensors(lambda state: [state.pop(name) for name in [*state][::2]]), "lacks "),
    "NaN": (tensors(lambda state: state["0.2.weight"].fill_(torch.nan)), "not finite in float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_heads_are_refused_in_a_sentence(name, good, tmp_path):
    folder = written(tmp_path / "h", ORIGINAL, original(*parts(16, 4160)))
    change, expected = BAD[name]
    change(folder)
    with pytest.raises(ConfigError, match=expected) as error:
        parts_of("target=model", f"target.path={good}", "drafter=medusa", f"drafter.path={folder}", "gamma=2")
    assert f"drafter.path={folder}" in str(error.value) and "\n" not in str(error.value)
