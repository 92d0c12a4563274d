"""Tiny modules of Llama-like layers, and how far a way of running them is from the module itself."""

import copy

import torch
import transformers
from decoder_cases import CACHES

from specbench.decoding.sampling import Sampling
from specbench.decoding.token_tree import static_tree
from specbench.executors.eager import EagerExecutor
from specbench.models.language_model import LanguageModel

PARENTS, CHAIN, COLUMNS = (0, 0, 1, 1, 2), (0, 1, 2, 3, 4), 32
TEXT = [5, 9, 2, 7, 11, 30, 8, 1, 64, 3, 3, 17, 20, 41]
KINDS = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {"head_dim": 16}, "mistral": {"sliding_window": 5},
    "ministral3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.1}},
}  # fmt: skip


def tiny(kind: str, layers: int = 2, dtype=torch.float32, **more):
    """A tiny module whose norms and biases are no ones and zeros, and whose eps matters."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 70, "max_position_embeddings": 96, "initializer_range": 0.3,
        "rms_norm_eps": 0.1, "pad_token_id": 0, **KINDS.get(kind, {}), **more,
    })  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
    return module.to(dtype)


def made(module, how: str, cache, executor=None):
    """A model of the module with an empty cache."""
    return LanguageModel(module, None, name="tiny", sampling=Sampling(), new_cache=cache,
                         executor=executor or EagerExecutor(), attention=how)  # fmt: skip


def model_of(module, how: str, cache: str = "static", rows: int = 1, columns: int = COLUMNS):
    model = made(copy.deepcopy(module), how, CACHES[cache])
    assert (model.fused is not None) == (how != "sdpa")
    model.allocate(rows, columns)
    model.cache.reserve([columns] * rows)
    return model


@torch.no_grad()
def read(model, tokens, first, parents=None):
    """Logits after tokens [b, N] from the columns first on, on the CPU."""
    tree = None if parents is None else static_tree(parents, model.device)
    tokens, first = torch.tensor(tokens, device=model.device), torch.tensor(first, device=model.device)
    return model.forward(tokens, first, model.cache.capacity, tree=tree).cpu()


def forwards(model):
    """Logits of two rows of unequal lengths: a text, a token, a chain and a tree; and what is cached then."""
    found = [read(model, [TEXT[:8], TEXT[3:11]], [0, -3])]
    found.append(read(model, [[12], [13]], [8, 5]))
    found.append(read(model, [TEXT[:6], TEXT[5:11]], [9, 6]))
    found.append(read(model, [[1, 2, 3, 4, 5, 6]] * 2, [12, 9], PARENTS))
    return found + [t[:, :, :9].cpu() for t in model.cache.tensors() if t.dim() == 4]


def error(module, how, cache="static") -> float:
    """The largest difference from SDPA in the module itself, as a share of the largest value."""
    found, right = forwards(model_of(module, how, cache, 2)), forwards(model_of(module, "sdpa", cache, 2))
    assert len(found) == len(right) >= 4
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


def error_of_hidden_states(module, how, layers) -> float:
    """As `error`, of the hidden states of these layers that two forwards note."""
    found = []
    for way in (how, "sdpa"):
        model = model_of(module, way)
        with model.noting(layers) as hidden:
            read(model, [TEXT[:8]], [0])
            read(model, [TEXT[8:10]], [8])
        assert len(hidden) == 2 and "forward" not in vars(model.module.lm_head)
        found.append(torch.cat(hidden, 1))
    assert found[0].shape == (1, 10, module.config.hidden_size * max(1, len(layers)))
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())
