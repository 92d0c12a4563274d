"""Writes a head of DeepSpec's shape with random weights, so that its step can be timed without a hub.

python experiments/random_head.py FOLDER drafter=deepspec_dspark_qwen3_4b
python -m specbench drafter=deepspec_dspark_qwen3_4b drafter.path=FOLDER target.weights=random verifier=synthetic

The head is EAGLE-3, DFlash or DSpark as the drafter's name says, for `target.shape`, which both commands may change
alike (`target.shape.num_hidden_layers=8`). Its embedding and output matrix are the target's. Random weights accept next
to nothing: `verifier=synthetic verifier.length=3` gives an acceptance length.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn

from specbench.config.compose import compose
from specbench.drafters.dflash_config import parse_dflash
from specbench.drafters.dflash_network import DFlashNetwork, Markov
from specbench.drafters.eagle3_checkpoint import own_name, parse_config, skeleton

BLOCK, RANK, LAYERS, MASK = 7, 256, 5, 151669  # DeepSpec's config/dspark/*.py
OWN = ("embed_tokens.weight", "lm_head.weight")  # which the target has too


def config_of(kind: str, shape: dict[str, Any]) -> dict[str, Any]:
    """The config.json that DeepSpec writes for a head of this kind."""
    total = shape["num_hidden_layers"]
    config = shape | {
        "target_layer_ids": [round(1 + i * (total - 4) / 4) for i in range(5)],
        "num_target_layers": total,
    }
    config |= {"tie_word_embeddings": False, "num_hidden_layers": 1 if kind == "eagle3" else LAYERS}
    if kind == "eagle3":
        return config | {"architectures": ["Qwen3Eagle3Model"], "ttt_length": BLOCK}
    dspark = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
    mask = min(MASK, shape["vocab_size"] - 1)
    config |= {"architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": mask}
    return config | (dspark if kind == "dspark" else {})


def module_of(kind: str, config: dict[str, Any]) -> nn.Module:
    """The head without values."""
    size, vocab = config["hidden_size"], config["vocab_size"]
    with torch.device("meta"):
        if kind == "eagle3":
            made: nn.Module = skeleton(parse_config(config, None, kind), bias=False)
            return made
        network = DFlashNetwork(parse_dflash(config, kind), len(config["target_layer_ids"]) * size)
        if kind == "dspark":
            network.markov_head = Markov(vocab, RANK, vocab)
            network.confidence_head = nn.ModuleDict({"proj": nn.Linear(size + RANK, 1)})
    return network


def values(name: str, like: Tensor) -> Tensor:
    """What transformers begins to train with, in the shape of `like`."""
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    return torch.randn(like.shape, dtype=torch.bfloat16) * 0.02


def main(folder: Path, words: list[str]) -> None:
    chosen = compose(words)
    kind = chosen.drafter.path.partition("/")[2].partition("_")[0]  # of deepseek-ai/dspark_qwen3_4b_block7
    shape: Any = OmegaConf.to_container(chosen.target.shape)
    config = config_of(kind, shape)
    named = {own_name(name): tensor for name, tensor in module_of(kind, config).state_dict().items()}
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: values(name, tensor) for name, tensor in named.items() if name not in OWN}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(tensor.numel() for tensor in tensors.values()):,} weights of a {kind} head in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
