"""Estimates the memory of a run from model shapes before anything loads, and compares it with what is free."""

import gc
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from specbench.errors import ConfigError
from specbench.executors.machine import free_bytes
from specbench.settings import UNLIMITED_CONTEXT

HEARING = ("whisper",)  # model types whose encoder reads features of a sound, as many frames of every one
DIVIDING = ("colwise", "rowwise", "embedding")  # in the names of plans that divide a weight
LOGIT_COPIES = 4  # float32 or wider: logits, probabilities, their differences, the exponential race
LAW_COPIES = 12  # float64: p, q and what betas along a text are computed from
GRAPH_COPIES = 2  # of what scoring takes: the pool of CUDA graphs, and the graphs' inputs and results outside of it


@dataclass(frozen=True)
class ModelSize:
    """The size of one model: bytes of weights and per cached position, and the widths that activations depend on."""

    weights: int  # bytes, with those of buffers
    tied: int  # bytes of an output matrix that is also the embedding: packed, it exists twice
    column: int  # bytes of keys and values of one position
    layers: int
    context: int  # tokens
    vocab_size: int
    widest: int  # values per token of its widest layer
    crossing: int = 0  # bytes of keys and values of one position of an encoder's input, if there is an encoder
    heads: int = 1  # of the encoder
    heard: int = 0  # positions of every sound that the encoder reads; 0 if it reads tokens
    recurrent: bool = False  # whether some of its layers carry a state
    divisible: int = 0  # bytes of the weights that ranks would share

    @staticmethod
    def of(config: transformers.PretrainedConfig, dtype: torch.dtype, module: Any) -> "ModelSize":
        """From the shape alone, and its `module` that was built without memory."""
        if config.is_encoder_decoder:
            return ModelSize._of_encoder_decoder(config, module, dtype)
        text = config.get_text_config()
        inner = size_of(text, "intermediate_size") or 4 * text.hidden_size
        head, inputs = module.get_output_embeddings(), module.get_input_embeddings()
        return ModelSize(
            tied=head.weight.nbytes if head is not None and head.weight is inputs.weight else 0,
            weights=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            column=2 * sum(map(_values_per_column, layers_of(text))) * dtype.itemsize,
            layers=text.num_hidden_layers,
            context=context_of(text, "decoder"),
            vocab_size=text.vocab_size,
            widest=2 * (max(inner) if isinstance(inner, list) else inner) + 4 * text.hidden_size,
            divisible=_divisible(module),
        )

    def share(self, processes: int) -> "ModelSize":
        """What one of so many processes holds of the model, if they share its weights."""
        if processes == 1:
            return self
        weights = self.weights - self.divisible + -(-self.divisible // processes)
        return replace(self, weights=weights, tied=0, column=-(-self.column // processes), divisible=0)

    @staticmethod
    def _of_encoder_decoder(config: Any, module: Any, dtype: torch.dtype) -> "ModelSize":
        layers = getattr(config, "num_decoder_layers", None) or config.decoder_layers
        hidden = getattr(config, "d_model", None) or config.hidden_size
        width = config.num_heads * config.d_kv if hasattr(config, "d_kv") else hidden
        inner = max(getattr(config, name, 0) for name in ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"))
        head, inputs = module.get_output_embeddings(), module.get_input_embeddings()
        return ModelSize(
            tied=head.weight.nbytes if head.weight is inputs.weight else 0,
            weights=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            column=2 * layers * width * dtype.itemsize,
            layers=layers,
            context=context_of(config, "decoder"),
            vocab_size=config.vocab_size,
            widest=2 * inner + 4 * hidden,
            crossing=2 * layers * width * dtype.itemsize,
            heads=config.num_attention_heads,
            heard=context_of(config, "encoder") if hears(config) else 0,
        )


def _divisible(module: Any) -> int:
    """Bytes of the weights that transformers' plan for tensor parallelism divides: by module, or by parameter."""
    plan = {name for name, style in (module.tp_plan or {}).items() if any(word in style for word in DIVIDING)}
    names = ((re.sub(r"\d+", "*", name), weight.nbytes) for name, weight in module.named_parameters())
    return sum(size for name, size in names if name in plan or name.rpartition(".")[0] in plan)


def size_of(config: Any, name: str) -> Any:
    """A size in a configuration, or None if there is none, or if layers have sizes of their own."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def layers_of(text: Any) -> Sequence[Any]:
    """The configuration of each layer: one and the same, unless layers have sizes of their own."""
    own = getattr(text, "per_layer_config", None)
    return [own[layer] if own else text for layer in range(text.num_hidden_layers)]


def _values_per_column(layer: Any) -> int:
    """Numbers in the keys of one position, from a layer's configuration."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    key_heads = getattr(layer, "num_key_value_heads", None) or heads
    return int(key_heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads))


def context_of(config: transformers.PretrainedConfig, side: str) -> int:
    """Tokens, or positions of a sound, that the encoder or the decoder, `side`, reads at most. LED and Whisper have one
    number for each, MPT its own name."""
    of_sounds = {"encoder": "max_source_positions", "decoder": "max_target_positions"}[side]
    names = (f"max_{side}_position_embeddings", "max_position_embeddings", "max_seq_len", of_sounds)
    return int(next((found for name in names if (found := getattr(config, name, None))), UNLIMITED_CONTEXT))


def hears(config: transformers.PretrainedConfig) -> bool:
    """Whether this is an encoder-decoder whose encoder reads sounds."""
    return bool(config.is_encoder_decoder) and config.model_type in HEARING


def loader_of(config: transformers.PretrainedConfig) -> str:
    """The name of the class of transformers that makes modules of a configuration."""
    if hears(config):
        return "AutoModelForSpeechSeq2Seq"
    return "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"


def without_memory(config: transformers.PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The module of a configuration, without memory for its weights. Errors are those of transformers."""
    kind: Any = getattr(transformers, loader_of(config))
    with torch.device("meta"):
        return kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


@dataclass(frozen=True)
class Budget:
    """Bytes that a run needs, by purpose, and bytes that are free."""

    weights: int
    kv: int
    activations: int
    graphs: int  # what CUDA graphs keep, and calls before a capture take
    free: int
    rows: int
    columns: int
    device: torch.device
    processes: int = 1  # that share the target, or the machine's memory: all of this is one process's

    @staticmethod
    def of(
        models: Sequence[ModelSize],
        copies: int,
        doubled: int,
        laws: int,
        rows: int,
        columns: int,
        held: int,
        tokens: int,
        prefill_chunk: int,
        read_again: int,
        graphs: bool,
        dtype: torch.dtype,
        device: torch.device,
        inputs: int = 0,
        processes: int = 1,
    ) -> "Budget":
        """`copies` of all weights and `doubled` bytes of them once more, `laws` bytes of kept probabilities, `held`
        cache columns in all rows together, encoder's inputs of at most `inputs` tokens, and forwards of `tokens` tokens
        per row. Betas along texts are computed of `read_again` tokens at a time. `graphs` says whether calls are
        captured."""
        chunk = min(prefill_chunk, rows * columns)
        reading = max(chunk * (m.widest * dtype.itemsize + columns) for m in models)
        encoding = max(inputs * (m.widest + m.heads * inputs) * dtype.itemsize for m in models)
        largest = max(m.vocab_size for m in models)
        scoring, again = LOGIT_COPIES * rows * tokens * largest * 4, LAW_COPIES * read_again * largest * 8
        stand_in = held * max(m.column // m.layers for m in models)
        return Budget(
            weights=copies * sum(m.weights for m in models) + doubled,
            kv=held * sum(m.column for m in models) + rows * inputs * sum(m.crossing for m in models),
            activations=max(reading, encoding, scoring, again) + laws,
            graphs=GRAPH_COPIES * scoring + stand_in if graphs else 0,
            free=free_bytes(device) // (processes if device.type == "cpu" else 1),
            processes=processes,
            rows=rows,
            columns=columns,
            device=device,
        )

    def __str__(self) -> str:
        graphs = f", graphs about {size(self.graphs)}" if self.graphs else ""
        whose = f" of each of {self.processes} processes" if self.processes > 1 else ""
        return (
            f"memory{whose}: weights {size(self.weights)}, keys and values {size(self.kv)} "
            f"({self.rows} rows of {self.columns:,} tokens), activations about {size(self.activations)}{graphs}; "
            f"{size(self.free)} free on {self.device}"
        )

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv + self.activations + self.graphs

    def check(self) -> None:
        """Raises ConfigError if the run does not fit."""
        if self.needed > self.free:
            change = "a smaller model, dtype=bfloat16, executor=eager, which holds weights once, another device, or "
            change += "several with target.tensor_parallel (python -m specbench.plan --devices says how many)"
            if self.weights < self.free:
                change = "a smaller batch_size or max_new_tokens, or fewer cache.blocks with cache=paged"
            raise ConfigError(f"the run needs {size(self.needed)} but does not have it ({self}): use {change}")


def reset_peak(device: torch.device) -> None:
    """Forgets the largest memory in use so far, so that `torch.cuda.max_memory_allocated` is of what follows."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of this process that were in use, on CUDA of the device's allocator."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back() -> None:
    """Frees the models and graphs of an earlier job, which refer to each other, and returns what PyTorch keeps of the
    GPU's memory, which `free_bytes` does not count as free."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def size(count: int) -> str:
    """Bytes as text: 1500000000 is "1.5 GB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
