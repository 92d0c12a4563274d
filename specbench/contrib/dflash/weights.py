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
from specbench.models.published import fill, place, read_tensors, targets_of, with_products
from specbench.models.vocabulary import DraftVocabulary, VocabMap

MARKOV = "markov_head."
UNUSED = "confidence_head."  # DSpark's estimate of acceptance
OUTSIDE = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")


def load_dflash(path: str, key: str, config: DFlashConfig, target: LanguageModel) -> DFlashModel:
    """The drafter of a folder or hub id for a target. Raises ConfigError if its tensors and its config.json disagree,
    or if it does not fit the target."""
    named, text = f"{key}={path}", target.config
    refuse_unfit(config, named, target.name, text)
    layers = config.layers_of(text.num_hidden_layers)
    tensors, size = named_tensors(read_tensors(path, key), config), target.vocab_size
    with reading(key, path, "weights"):
        targets = targets_of(tensors, config.options.draft_vocab_size or size, size)
    network = DFlashNetwork(config, len(layers) * text.hidden_size)
    fill(network, {n: t for n, t in tensors.items() if n not in OUTSIDE and not n.startswith(MARKOV)}, named)
    markov = None
    if config.options.markov_rank:
        with torch.device("meta"):
            predicted = config.options.draft_vocab_size or target.vocab_size
            markov = Markov(target.vocab_size, config.options.markov_rank, predicted)
        fill(markov, {n.removeprefix(MARKOV): t for n, t in tensors.items() if n.startswith(MARKOV)}, named)
        place(markov, named, target)
    place(network, named, target)
    network = with_products(network, target.executor)
    network.rotary = Qwen3RotaryEmbedding(config.layers).to(target.device)  # its frequencies stay in 32 bits
    stock: Any = target.module
    network.embed_tokens, network.lm_head = stock.get_input_embeddings(), stock.get_output_embeddings()
    for name, part in (("embed_tokens", nn.Embedding), ("lm_head", nn.Linear)):
        if (own := tensors.get(f"{name}.weight")) is not None:
            setattr(network, name, _matrix(part, own, name, config, target, named))
    target.feature_layers = layers
    vocabulary = VocabMap(size, size) if targets is None else DraftVocabulary(targets.to(target.device), size, size)
    return DFlashModel(network, markov, config, vocabulary, target)


def refuse_unfit(config: DFlashConfig, named: str, target: str, text: Any) -> None:
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


def _matrix(
    kind: type[nn.Module], weight: Tensor, name: str, config: DFlashConfig, target: LanguageModel, named: str
) -> nn.Module:
    """An embedding or output matrix of the checkpoint's own."""
    rows = target.vocab_size if kind is nn.Embedding else config.options.draft_vocab_size or target.vocab_size
    shape = (rows, config.layers.hidden_size)
    with torch.device("meta"):
        made = kind(*shape) if kind is nn.Embedding else kind(shape[1], shape[0], bias=False)
    fill(made, {"weight": weight}, f"{named}, {name},")
    place(made, named, target)
    return with_products(nn.ModuleList([made]), target.executor).get_submodule("0")
