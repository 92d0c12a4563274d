"""Worker of openvino-genai: the time from the first token to the end, as its pipelines report it."""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from protocol import DecodeResult, Mode, Request, serve


def decode(pipe: Any, drafting: dict[str, int], request: Request) -> DecodeResult:
    """One prompt."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.apply_chat_template = request["new"], False
    config.stop_token_ids = set(request["stop"])
    config.rng_seed = request["seed"]
    if request["temperature"] > 0:
        config.do_sample, config.temperature, config.top_p = True, request["temperature"], 1.0
        config.top_k = 1_000_000  # all: 0 is not allowed
    for name, value in drafting.items():
        setattr(config, name, value)
    found = pipe.generate(openvino.Tensor(np.array([request["ids"]], dtype=np.int64)), config)
    metrics = found.perf_metrics
    counts = metrics.raw_metrics.m_batch_sizes  # tokens of each step
    seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3
    return list(found.tokens[0]), sum(counts) - counts[0], seconds


def load(args: argparse.Namespace) -> tuple[Mapping[str, Mode], str]:
    """Plain by each of the two kinds of attention, with the drafter if there is one, and with a lookup of the last two
    tokens."""
    props: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": args.precision,
        "INFERENCE_NUM_THREADS": args.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    if args.precision == "f32":
        props["KV_CACHE_PRECISION"] = "f32"  # keys and values have 8 bits otherwise
    paged = genai.SchedulerConfig()
    paged.cache_size, paged.enable_prefix_caching = 1, False
    target, count = str(args.folder / "openvino" / args.target_name), {"num_assistant_tokens": args.gamma}

    def pipe(**options: Any) -> Any:
        return genai.LLMPipeline(target, "CPU", **props, **options)

    modes = {
        "plain": partial(decode, pipe(scheduler_config=paged), {}),
        "plain_sdpa": partial(decode, pipe(ATTENTION_BACKEND="SDPA"), {}),
        "lookup": partial(decode, pipe(scheduler_config=paged, prompt_lookup=True), count | {"max_ngram_size": 2}),
    }
    if args.drafter:
        draft = genai.draft_model(str(args.folder / "openvino" / args.drafter_name), "CPU", **props)
        modes["draft"] = partial(decode, pipe(scheduler_config=paged, draft_model=draft), count)
    return modes, f"openvino-genai {genai.__version__}"


if __name__ == "__main__":
    serve(load)
