"""Medusa heads of others: logits of each format by a plain implementation, trees, law, and files that are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import WEIGHTS, Harmful, checkpoint, config, tensors, without
from decoder_cases import make_drafter, tabular_model
from law_cases import FEW, SAMPLING, Law, decode, start, worst_excess
from safetensors.torch import save_file
from small_runs import composed, small

from specbench.config.build import build
from specbench.config.validate import check
from specbench.errors import ConfigError
from specbench.models.published_heads import read_heads
from specbench.verifiers.speculative import SpeculativeVerifier

HEADS, LAYERS, HIDDEN, VOCABULARY = 3, 2, 16, 24
PICKLE = "medusa_lm_head.pt"
KEPT = [7, 2, 19, 11, 4]
HIDDEN_STATES = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
ORIGINAL = {"medusa_num_heads": 2, "medusa_num_layers": LAYERS, "base_model_name_or_path": "x/y",
            "transformers_version": "4.31.0"}  # fmt: skip
VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
        "num_heads": HEADS, "num_hidden_layers": LAYERS, "max_paths": 64, "topk": 10,
        "truncated_vocab_size": VOCABULARY}  # fmt: skip


def random(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number)) / 3


def parts(hidden: int = HIDDEN, vocabulary: int = VOCABULARY, bias: bool = True):
    """L [K, layers, H, H], b [K, layers, H] and W [K, V, H]."""
    blocks = random(1, HEADS, LAYERS, hidden, hidden)
    return blocks, random(2, HEADS, LAYERS, hidden) * bias, random(3, HEADS, vocabulary, hidden)


def original(L, b, W, prefix: str = "") -> dict[str, torch.Tensor]:
    state = {f"{prefix}{k}.{LAYERS}.weight": W[k].clone() for k in range(HEADS)}
    for k in range(HEADS):
        for j in range(LAYERS):
            state[f"{prefix}{k}.{j}.linear.weight"] = L[k, j].clone()
            state[f"{prefix}{k}.{j}.linear.bias"] = b[k, j].clone()
    return state


def vllm(L, W) -> dict[str, torch.Tensor]:
    state = {f"lm_heads.{k}.weight": W[k].clone() for k in range(len(W))}
    return state | {f"medusa_heads.blocks.{k}.layers.{j}.weight": L[k, j].clone() for k in range(HEADS)
                    for j in range(LAYERS)}  # fmt: skip


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


def test_a_block_that_is_repeated_may_be_stored_once(tmp_path):
    L, b, W = parts()
    state = {name: tensor for name, tensor in original(L, b, W).items() if ".1.linear." not in name}
    found = of_folder(written(tmp_path / "h", ORIGINAL, state, PICKLE))
    compared(found, L[:, [0, 0]], b[:, [0, 0]], W)


def test_merged_checkpoints_are_heads_and_target(tmp_path):
    """Of a whole model; the target loads from the same folder."""
    folder = checkpoint(tmp_path / "merged")
    L, b, W = parts(16, 4160)
    tensors(lambda state: state.update(original(L, b, W, "medusa_head.")))(folder)
    config(medusa_num_heads=HEADS, medusa_num_layers=LAYERS)(folder)
    compared(of_folder(folder), L, b, W)
    run = ["target=model", f"target.path={folder}", "drafter=medusa", f"drafter.path={folder}", "gamma=2"]
    assert build(check(composed(*small(*run)))).drafter.longest == HEADS


def test_vllm_s_format(tmp_path):
    L, b, W = parts(bias=False)
    compared(of_folder(written(tmp_path / "h", VLLM, vllm(L, W))), L, b, W)
    scaled = of_folder(written(tmp_path / "h", VLLM | {"logit_scale": 0.5}, vllm(L, W)))
    assert np.abs(scaled - plain(L, b, W) / 2).max() < 1e-5


@pytest.mark.parametrize("whole", [True, False])
def test_a_truncated_vocabulary_has_no_logits_elsewhere(whole, tmp_path):
    L, b, W = parts(bias=False)
    state = vllm(L, W if whole else W[:, KEPT]) | {"token_map": torch.tensor(KEPT)}
    found = of_folder(written(tmp_path / "h", VLLM | {"truncated_vocab_size": len(KEPT)}, state))
    elsewhere = [token for token in range(VOCABULARY) if token not in KEPT]
    assert (found[..., elsewhere] == -np.inf).all()
    compared(found[..., KEPT], L, b, W[:, KEPT])
    assert np.abs(found[..., KEPT] - plain(L, b, W)[..., : len(KEPT)]).max() > 0.1  # control: a map that is ignored


def test_a_missing_matrix_is_the_target_s(tmp_path):
    L, b, W = parts(bias=False)
    output = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    output.weight.data = W[1]
    for state in (vllm(L, W[:0]), vllm(L, W[1:2])):  # none, or one for all heads
        settings = VLLM | {"original_lm_head": True}
        compared(of_folder(written(tmp_path / "h", settings, state), output), L, b, W[[1, 1, 1]])


def test_truncated_heads_leave_the_target_s_law(few_contexts, number_text):
    tables = few_contexts
    outputs = decode(tables, number_text, "truncated_heads", verifier=SpeculativeVerifier, trials=FEW)
    assert worst_excess(outputs, Law(tables.target)) < 1


def test_q_of_truncated_heads_is_zero_elsewhere(tables, number_text):
    target, state = tabular_model(tables.target, SAMPLING), start(8)
    drafter = make_drafter("truncated_heads", target, number_text)
    drafter.begin(state)
    drafter.hidden = torch.arange(8.0)[:, None]
    draft = drafter.guesses(state, [3] * 8)
    assert torch.equal(draft.probs.sum(-1).round(decimals=5), torch.ones(8, 3)) and draft.tokens.max() > 0
    assert draft.probs[..., torch.arange(16) % 3 > 0].abs().max() == 0 and (draft.tokens % 3 == 0).all()


# -- Files that are refused --------------------------------------------------------------------------


def edit(change):
    """Changes the tensors in a pickle."""

    def changed(folder):
        state = torch.load(folder / PICKLE, weights_only=True)
        change(state)
        torch.save(state, folder / PICKLE)

    return changed


def harmful(folder):
    torch.save({"0.0.linear.weight": Harmful(folder / "ran")}, folder / PICKLE)


def token_map(tokens, size=2):
    return lambda folder: (
        written(folder, VLLM | {"vocab_size": 4160, "truncated_vocab_size": size},
                vllm(*(parts(16, 4160)[i] for i in (0, 2))) | {"token_map": torch.tensor(tokens)}),
        (folder / PICKLE).unlink())  # fmt: skip


BROKEN = {
    "half a checkpoint": (edit(lambda state: state.pop("1.0.linear.weight")), "lacks blocks.1.layers.0.weight"),
    "a head less than stated": (config(medusa_num_heads=4), "3 heads of 2 layers, which its config.json denies"),
    "layers that are not there": (config(medusa_num_layers=3), "denies"),
    "a tensor too many": (edit(lambda state: state.update(extra=torch.ones(3))), "no place for: extra"),
    "no heads": (edit(lambda state: state.clear() or state.update(extra=torch.ones(3))), "holds no Medusa heads"),
    "an unknown key": (config(medusa_depth=3), "config.json medusa_depth is not a setting"),
    "no weights": (without(PICKLE), "no weights"),
    "a pickle of code": (harmful, "is no pickle of tensors alone, and was not run"),
    "another target's width": (
        lambda folder: written(folder, ORIGINAL, original(*parts()), PICKLE),
        "hidden states of 16 and 24 tokens, but",
    ),
    "accuracy that is text": (config(accuracy="high"), "accuracy"),
    "a token twice": (token_map([3, 3]), "token_map that is no list of different tokens below 4160"),
    "a token beyond the vocabulary": (token_map([3, 4160]), "token_map that is no list of different tokens"),
    "a map of another size": (token_map([3, 4, 5]), "lm_heads.0.weight [3, 16] for [2, 16]"),
    "NaN": (edit(lambda state: state["0.0.linear.weight"].fill_(torch.nan)), "not finite in float32"),
}
LATE = ("a token twice", "a token beyond the vocabulary", "NaN")  # found when values are read


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_heads_of_others_are_refused(name, tmp_path, target):
    change, expected = BROKEN[name]
    folder = written(tmp_path / "h", ORIGINAL, original(*parts(16, 4160)), PICKLE)
    change(folder)
    wanted = small("target=model", f"target.path={target}", "drafter=medusa", f"drafter.path={folder}", "gamma=2")
    with pytest.raises(ConfigError) as refused:
        checked = check(composed(*wanted))
        assert name in LATE, "nothing was refused before the target loads"
        build(checked)
    assert str(refused.value).startswith(f"drafter.path={folder}") and expected in str(refused.value), refused.value
    assert not (folder / "ran").exists()


def test_a_tree_of_heads_without_accuracy_is_that_of_an_assumed_one(tmp_path, target):
    folder = written(tmp_path / "h", ORIGINAL, original(*parts(16, 4160)), PICKLE)
    run = small("target=model", f"target.path={target}", "drafter=medusa", f"drafter.path={folder}", "gamma=3")
    assert build(check(composed(*run))).drafter.trees_by_depth[HEADS][1][:4] == (0, 1, 2, 3)
    config(accuracy=[[0.9, 0.01], [0.9, 0.01], [0.9, 0.01]])(folder)
    assert build(check(composed(*run))).drafter.trees_by_depth[HEADS][1][:3] == (0, 1, 0)
