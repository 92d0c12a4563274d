"""Worker of economize. Its first call of the target's output layer ends the reading of the prompt and gives a token; a
draft model reads the prompt in the round after that, which is left out, too, with the tokens that it decided."""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import economize
import torch
from economize.techniques.draft_model import DraftModelConfig
from economize.techniques.lookup import LookupConfig
from protocol import DecodeResult, Mode, Request, serve
from transformers import AutoModelForCausalLM


def decode(model: Any, calls: list[float], cycle: int, reads_prompt: bool, request: Request) -> DecodeResult:
    """One prompt. `calls` is where the target's output layer notes when it was called."""
    selector = verifier = None
    if request["temperature"] > 0:
        selector = economize.TopPSampler(temperature=request["temperature"], seed=request["seed"])
        verifier = "rejection" if cycle > 1 else None
    config = economize.DecodeConfig(cycle_length=cycle, verifier=verifier)
    calls.clear()
    found = model.decode(
        torch.tensor(request["ids"]), request["new"], decoding=config, selector=selector, stop=request["stop"]
    )
    end, count = time.perf_counter(), len(found.tokens)
    if not reads_prompt:
        return found.tokens.tolist(), count - 1, end - calls[0]
    if len(calls) < 2:  # the text ended with its first token
        return found.tokens.tolist(), 0, 0.0
    _, accepted = found.acceptance[0]
    return found.tokens.tolist(), max(0, count - 1 - (accepted + 1)), end - calls[1]


def load(args: argparse.Namespace) -> tuple[Mapping[str, Mode], str]:
    """Plain, with the drafter, and with a lookup of the last two tokens."""
    if args.precision != "f32":
        raise ValueError(f"it is measured in f32 only, not {args.precision}")
    torch.set_num_threads(args.threads)
    made = {}
    for name, technique in (
        ("draft", DraftModelConfig(model=str(args.drafter))),
        ("lookup", LookupConfig(max_ngram=2)),
    ):
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
        calls: list[float] = []
        target.get_output_embeddings().register_forward_hook(lambda *_, calls=calls: calls.append(time.perf_counter()))
        made[name] = (economize.apply(target, technique), calls)
    modes = {
        "plain": partial(decode, *made["draft"], 1, False),
        "draft": partial(decode, *made["draft"], args.gamma + 1, True),
        "lookup": partial(decode, *made["lookup"], args.gamma + 1, False),
    }
    return modes, f"economize {version('economize')}"


if __name__ == "__main__":
    serve(load)
