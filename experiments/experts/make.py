"""What does verification cost where tokens wake experts? One target call on n tokens, for n from 1 to 16.

    python experiments/experts/make.py

Random weights in the shape of OLMoE-1B-7B's layers (64 experts, 8 of each token), two layers of them, and a dense
model that has as many weights in its layers as a token wakes. Every round times one call of each n on the same text, in
an order that changes; v is the median over rounds of a call's time over that of the call on one token of its round.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Measured, Row, commit, here, machine, make, number, text

from specbench.cache.static import StaticCache
from specbench.data.stdlib_corpus import read_modules
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models.context import Context
from specbench.models.pretrained import PretrainedModel
from specbench.results.report.style import MEASURED, OTHER
from specbench.stats.experts import ExpertCounter
from specbench.theory import distinct_experts

CPU = torch.device("cpu")
TOKENS = (1, 2, 3, 4, 5, 6, 8, 11, 16)
ROUNDS, BEFORE = 7, 64  # timed rounds, and tokens of the text before each call
SIZES = dict(vocab_size=4096, hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16,
             max_position_embeddings=512, initializer_range=0.02, pad_token_id=None)  # fmt: skip
MODELS = {
    "experts": dict(SIZES, model_type="olmoe", intermediate_size=1024, num_experts=64, num_experts_per_tok=8),
    "dense": dict(SIZES, model_type="llama", intermediate_size=8 * 1024),
}


def load(name: str) -> PretrainedModel:
    """A model of this shape with random weights, in float32."""
    settings = PretrainedModel.Settings("shape", weights="random", chat_template="never", shape=MODELS[name])
    return PretrainedModel(settings, Context(CPU, torch.float32, Sampling(), StaticCache, EagerExecutor()), "target")


def call(model: PretrainedModel, tokens: torch.Tensor, counter: ExpertCounter) -> tuple[float, float]:
    """Seconds of a call on tokens [1, n] behind the text, and the distinct experts of a layer that it wakes."""
    counter.woken = {}
    began = time.perf_counter()
    model.logits(tokens, [BEFORE])
    seconds = time.perf_counter() - began
    counter.count()
    woken = sum(found for _, found in counter.woken.values())
    return seconds, woken / max(1, len(model.expert_layers))


def of_model(name: str, ids: list[int]) -> list[Row]:
    """A row for each number of tokens."""
    model, generator = load(name), np.random.default_rng(0)
    model.allocate(1, BEFORE + max(TOKENS))
    counter = ExpertCounter(model.expert_layers)
    seconds: dict[int, list[float]] = {n: [] for n in TOKENS}
    woken: dict[int, list[float]] = {n: [] for n in TOKENS}
    with counter.watching():
        for turn in range(ROUNDS + 1):
            begin = turn * (BEFORE + max(TOKENS))
            text = torch.tensor([ids[begin : begin + BEFORE + max(TOKENS)]])
            model.logits(text[:, :BEFORE], [0])
            for n in generator.permutation(TOKENS).tolist():
                took, experts = call(model, text[:, BEFORE : BEFORE + n], counter)
                if turn:  # the first round warms up
                    seconds[n].append(took)
                    woken[n].append(experts)
    held = sum(p.nbytes for layer in model.expert_layers for p in layer.parameters(recurse=False))
    return [
        {"model": name, "tokens": n, "ms": 1e3 * statistics.median(seconds[n])}
        | {"v": statistics.median(a / b for a, b in zip(seconds[n], seconds[1], strict=True))}
        | ({} if name == "dense" else of_experts(model, n, statistics.mean(woken[n]), held))
        for n in TOKENS
    ]


def of_experts(model: PretrainedModel, n: int, woken: float, held: float) -> Row:
    """Woken experts of a layer, theory beside them, and the bytes of weights that a call reads over one token's."""
    experts, chosen = MODELS["experts"]["num_experts"], MODELS["experts"]["num_experts_per_tok"]
    one, rest = held / experts, model.step_bytes - held * chosen / experts
    return {"woken": woken, "independent": distinct_experts(experts, chosen, n),
            "bytes_v": (rest + woken * one) / model.step_bytes}  # fmt: skip


@torch.inference_mode()
def collect(inputs: list[str]) -> Measured:
    """Both models, one after the other, so that one of them is in memory."""
    if inputs:
        raise ConfigError(f"{inputs[0]} is not a setting of this measurement: it has none")
    facts, tokenizer = here(), load_tokens()
    rows = [row for name in MODELS for row in of_model(name, tokenizer)]
    return Measured(rows, machine(facts, "float32"), commit(facts))


def load_tokens() -> list[int]:
    """Tokens of held-out text, by the shipped tokenizer."""
    from transformers import AutoTokenizer

    from specbench.data.sources import SHIPPED

    texts = list(read_modules(held_out=True).values())
    found: list[int] = AutoTokenizer.from_pretrained(SHIPPED / "target")(texts[0][:20_000])["input_ids"]
    return found


TABLE = {
    "model": text("model"),
    "tokens": text("tokens"),
    "ms": number("ms", ".1f"),
    "v": number("v"),
    "experts woken in a layer": number("woken", ".1f"),
    "if routed independently": number("independent", ".1f"),
    "v if bytes of weights took all time": number("bytes_v"),
}


def draw(rows: Sequence[Row]) -> Figure:
    """Woken experts on the left, v on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    found = {name: [row for row in rows if row["model"] == name] for name in MODELS}
    experts, n = found["experts"], [row["tokens"] for row in found["experts"]]
    left.plot(n, [row["woken"] for row in experts], "o", color=MEASURED, label="counted")
    left.plot(n, [row["independent"] for row in experts], ":", color=OTHER, label="if routed independently")
    left.set_ylabel("distinct experts of a layer, of 64")
    right.plot(n, [row["v"] for row in experts], "o-", color=MEASURED, label="experts, measured")
    right.plot(n, [row["bytes_v"] for row in experts], ":", color=MEASURED, label="experts, by bytes of weights")
    right.plot(n, [row["v"] for row in found["dense"]], "s-", color=OTHER, label="dense, measured")
    right.set_ylabel("v: time of a call / of one on one token")
    for axes in (left, right):
        axes.set_xlabel("tokens of a call (gamma + 1)")
        axes.set_ylim(0)
        axes.legend(frameon=False)
        axes.grid()
    return figure


if __name__ == "__main__":
    make(__file__, __doc__, collect, TABLE, draw)
