"""Checkpoints that others publish, of every kind: what they take, and what is refused."""

import re

import pytest
from checkpoints import WEIGHTS, checkpoint, cut
from choosing import slow_unless
from published_cases import CHECKPOINTS, LAYERS, target, written
from small_runs import parts_of

from specbench.errors import ConfigError


def without_half(config, tensors):
    for name in list(tensors)[::2]:
        del tensors[name]


def nan(config, tensors):
    name = [name for name in tensors if name.endswith("weight")][-1]
    tensors[name] = tensors[name] / 0 - tensors[name] / 0


def beyond(config, tensors):
    tensors["d2t"] = tensors["d2t"] + 4160


NO_MODULE = "holds no multi-token-prediction module"
FAULTS = {  # what is wrong: what the sentence says, by drafter; another text for those that have their own
    "a folder of something else": {
        "eagle3": "lacks", "dflash": "is no DFlash checkpoint",
        "medusa": "holds no Medusa heads", "mtp": NO_MODULE,
    },
    "an empty folder": dict.fromkeys(CHECKPOINTS, "it has no config.json"),
    "no weights": dict.fromkeys(CHECKPOINTS, "no weights|holds no"),
    "half of the tensors": dict.fromkeys(CHECKPOINTS, "lacks ") | {"dflash": "it has no d2t"},
    "half of the file": dict.fromkeys(CHECKPOINTS, "damaged|could not be loaded"),
    "another target's width": dict.fromkeys(CHECKPOINTS, "hidden states of 16"),
    "NaN": dict.fromkeys(CHECKPOINTS, "not finite in float32"),
    "d2t out of range": dict.fromkeys(("eagle3", "dflash"), "d2t names tokens from"),
}  # fmt: skip


def spoiled(fault: str, kind: str, tmp_path) -> list[str]:
    """Overrides of a run with a checkpoint that has a fault."""
    folder = tmp_path / "drafter"
    if fault == "a folder of something else":
        return [*written(kind, folder), f"drafter.path={target()}"]
    change = {"half of the tensors": without_half, "NaN": nan, "d2t out of range": beyond}.get(fault)
    words = written(kind, folder, change) if change else written(kind, folder)
    weights = folder / ("medusa_lm_head.pt" if kind == "medusa" else WEIGHTS)
    if fault == "half of the file":
        cut(weights.name, 0.5)(folder)
    if fault in ("no weights", "an empty folder"):
        weights.unlink()
    if fault == "an empty folder":
        (folder / "config.json").unlink()
    if fault == "another target's width":
        words.append(f"target.path={checkpoint(tmp_path / 'wider', hidden_size=32, num_hidden_layers=LAYERS)}")
    return words


def is_fast(fault: str, kind: str) -> bool:
    """In the default run every kind is no checkpoint at all, and has some of the other faults."""
    names = [*FAULTS][1:]
    return fault not in names or ([*CHECKPOINTS].index(kind) - names.index(fault)) % 6 == 1


@pytest.mark.parametrize(("fault", "kind"), [
    slow_unless(is_fast(fault, kind), fault, kind) for fault, told in FAULTS.items() for kind in told
])  # fmt: skip
def test_bad_checkpoints_are_refused_in_a_sentence(fault, kind, tmp_path):
    with pytest.raises(ConfigError, match=FAULTS[fault][kind]) as error:
        parts_of("executor=eager", "gamma=2", *spoiled(fault, kind, tmp_path))
    assert "\n" not in str(error.value) and re.search(rf"drafter.path=|drafter={kind} ", str(error.value))
