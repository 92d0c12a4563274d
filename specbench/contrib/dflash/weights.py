"""The tensors of a DFlash checkpoint: their names, and the drafter that they make for a target."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specbench.contrib.dflash.config import DFlashConfig
from specbench.contrib.dflash.model import DFlashModel
from specbench.contrib.dflash.network import DFlashNetwork, Markov
from specbench.errors import ConfigError
from specbench.models.checkpoint import reading
from specbench.models.language_model import LanguageModel
from specbench.models.published import fill_module, place, read_tensors, targets_of, with_products
from specbench.models.vocabulary import DraftVocabulary, VocabMap

MARKOV = "markov_head."
UNUSED = "confidence_head."  # DSpark's estimate of acceptance
MAPS = ("d2t", "t2d")


def load_dflash(path: str, key: str, config: DFlashConfig, target: LanguageModel) -> DFlashModel:
    """The drafter of a folder or hub id for a target. Raises ConfigError if its tensors and its config.json disagree,
    or if it does not fit the target."""
    named, text = f"{key}={path}", target.config
    refuse_other_target(config, named, target.name, text)
    layers = config.layers_of(text.num_hidden_layers)
    tensors, size = named_tensors(read_tensors(path, key), config), target.vocab_size
    width, predicted = config.layers.hidden_size, config.options.draft_vocab_size or size
    stock: Any = target.module
    with reading(key, path, "weights"):
        targets = targets_of(tensors, predicted, size)
        network = DFlashNetwork(config, len(layers) * text.hidden_size)
    with reading(key, path, "weights"), torch.device("meta"):
        if "embed_tokens.weight" in tensors:
            network.embed_tokens = nn.Embedding(size, width)
        if "lm_head.weight" in tensors or predicted != size:
            network.lm_head = nn.Linear(width, predicted, bias=False)
        if config.options.markov_rank:
            network.markov_head = Markov(size, config.options.markov_rank, predicted)
    fill_module(network, {name: tensor for name, tensor in tensors.items() if name not in MAPS}, named)
    place(network, named, target)
    network = with_products(network, target.executor)
    network.rotary = Qwen3RotaryEmbedding(config.layers).to(target.device)  # its frequencies stay in 32 bits
    ends = {"embed_tokens": stock.get_input_embeddings(), "lm_head": stock.get_output_embeddings()}
    for name in ends.keys() - dict(network.named_children()).keys():
        network.add_module(name, ends[name])
    target.feature_layers = layers
    vocabulary = VocabMap(size, size) if targets is None else DraftVocabulary(targets.to(target.device), size, size)
    return DFlashModel(network, config, vocabulary, target)


def refuse_other_target(config: DFlashConfig, named: str, target: str, text: Any) -> None:
    """Raises ConfigError if the drafter does not fit a target whose configuration is `text`."""
    total, own = text.num_hidden_layers, config.layers
    if own.hidden_size != text.hidden_size:
        raise ConfigError(f"{named} is for hidden states of {own.hidden_size}, but {target} has {text.hidden_size}")
    if bad := [layer for layer in config.layers_of(total) if not 0 <= layer <= total]:
        raise ConfigError(f"{named} reads hidden states in front of layer {bad[0]}, but {target} has {total} layers")
    if config.options.mask_token_id >= text.vocab_size:
        raise ConfigError(
            f"{named} has mask_token_id={config.options.mask_token_id}, but {target} has {text.vocab_size} tokens"
        )


def named_tensors(tensors: Mapping[str, Tensor], config: DFlashConfig) -> dict[str, Tensor]:
    """Tensors by this network's names: joined projections are cut apart, DSpark's bias has its prefix, and what no
    draft needs is left out."""
    found: dict[str, Tensor] = {}
    own: Any = config.layers
    widths = [heads * own.head_dim for heads in (own.num_attention_heads, *[own.num_key_value_heads] * 2)]
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith(UNUSED):
            continue
        if ".qkv_proj." in name and len(tensor) == sum(widths):
            found |= {name.replace("qkv", part): cut for part, cut in zip("qkv", tensor.split(widths), strict=True)}
        else:
            found[MARKOV + name if name.startswith("markov_w") else name] = tensor
    return found
