"""Worker of onnxruntime-genai.

`append_tokens` reads the prompt. The first call of `generate_next_token` hands out the token that this gave; with a
draft model it is a whole round already, and the tokens that it decided are left out with the time that it took.
"""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from protocol import DecodeResult, Mode, Request, serve


def decode(model: Any, speculative: dict[str, int], request: Request) -> DecodeResult:
    """One prompt."""
    ids = request["ids"]
    params = genai.GeneratorParams(model)
    sampling: dict[str, Any] = {"do_sample": False}
    if request["temperature"] > 0:
        sampling = {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0,
                    "random_seed": request["seed"]}  # fmt: skip
    params.set_search_options(max_length=len(ids) + request["new"], batch_size=1, **sampling)
    if speculative:
        params.set_speculative_options(**speculative)
    generator = genai.Generator(model, params)
    generator.append_tokens(np.array([ids], dtype=np.int32))
    generator.generate_next_token()
    began = time.perf_counter()
    first = generator.token_count() - len(ids)
    if speculative:
        first += generator.get_speculative_stats().get("tokens_buffered", 0)
    while not generator.is_done():
        generator.generate_next_token()
    seconds = time.perf_counter() - began
    tokens = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
    return tokens[: request["new"]], max(0, len(tokens) - first), seconds


def load(args: argparse.Namespace) -> tuple[Mapping[str, Mode], str]:
    """Plain, with the drafter, and with a lookup of the last two tokens."""
    if args.precision != "f32":
        raise ValueError(f"it was converted for f32, not {args.precision}")
    models = {name: genai.Model(str(args.folder / "onnxruntime" / name)) for name in ("target", "pair")}
    modes = {
        "plain": partial(decode, models["target"], {}),
        "draft": partial(decode, models["pair"], {"max_draft_tokens": args.gamma}),
        "lookup": partial(decode, models["target"], {"ngram_size": 2, "max_draft_tokens": args.gamma}),
    }
    return modes, f"onnxruntime-genai {version('onnxruntime-genai')}"


if __name__ == "__main__":
    serve(load)
