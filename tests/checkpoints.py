"""Tiny checkpoints on disk, and ways to change or spoil them: each is a function of the folder."""

import json
import os
import pickle
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specbench.settings import SHIPPED

SIZES = dict(vocab_size=4160, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=2048, initializer_range=0.5)  # fmt: skip
SHAPE = dict(SIZES, model_type="llama", num_key_value_heads=2)
WEIGHTS = "model.safetensors"
NORM, EMBED, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"


def checkpoint(folder: Path, **changes) -> Path:
    """Writes a tiny model with random weights and the shipped tokenizer of 4,096 tokens; returns the folder."""
    tiny_module(**changes).save_pretrained(folder)
    return with_tokenizer(folder)


def tiny_module(seed: int = 0, **changes) -> PreTrainedModel:
    """A tiny Llama with random weights, or what `changes` of its configuration make of it."""
    torch.manual_seed(seed)
    shape = SHAPE | changes
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape)).eval()


def with_tokenizer(folder: Path) -> Path:
    """Puts the shipped tokenizer of 4,096 tokens into a folder; returns the folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / "target" / name, folder)
    return folder


def config_only(values: PreTrainedConfig, folder: Path) -> Path:
    """A folder with this configuration and the shipped tokenizer, but without weights."""
    values.save_pretrained(folder)
    return with_tokenizer(folder)


def edited(name, change):
    """Replaces the values in a JSON file by what a function makes of them, or leaves in place."""

    def edit(folder):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(change(values) or values))

    return edit


def config(**changes):
    """Changes values of config.json; a value of ... is taken out."""
    return edited("config.json", lambda values: {k: v for k, v in (values | changes).items() if v is not ...})


def edit_tokenizer(change):
    return edited("tokenizer.json", change)


def tensors(change, file=WEIGHTS):
    """Changes the dictionary of weights by a function."""

    def changed(folder):
        state = load_file(folder / file)
        change(state)
        save_file(state, folder / file, metadata={"format": "pt"})

    return changed


def pop(name):
    return tensors(lambda state: state.pop(name))


def put(name, index, value):
    return tensors(lambda state: state[name].view(-1)[index].fill_(value))


def content(name, text):
    """Writes a file."""
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def cut(name, share):
    """Keeps the first part of a file."""

    def shorten(folder):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: int(share * len(whole))])

    return shorten


def without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def then(*changes):
    return lambda folder: [change(folder) for change in changes]


def other(**shape):
    """Another architecture in place of the checkpoint."""
    return lambda folder: checkpoint(shutil.rmtree(folder) or folder, **shape)


def shards(change=lambda folder: None):
    """Splits the weights into files with an index."""

    def split(folder):
        module = AutoModelForCausalLM.from_pretrained(folder)
        (folder / WEIGHTS).unlink()
        module.save_pretrained(folder, max_shard_size="150KB")
        change(folder)

    return split


def binary(change=lambda state: state):
    """Weights as a pickle."""

    def write(folder):
        state = change(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        torch.save(state, folder / "pytorch_model.bin")

    return write


class Harmful:
    """Makes a file if it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def harmful(folder):
    (folder / WEIGHTS).unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"lm_head.weight": Harmful(folder / "ran")}, file)
