"""Whole runs on a CUDA device whose operations run on the CPU: decoding, the verdict, the results."""

import pytest
from cuda_on_cpu import answer_for_a_machine, cuda_on_cpu
from small_runs import composed

from specbench.config.build import build
from specbench.config.validate import check
from specbench.kernels import ops
from specbench.run.run import run

WAYS = {
    "sampled": ("temperature=1", "executor=eager"),
    "sampled, norms and products of several layers": (
        "temperature=1",
        "executor=cudagraph",
        "executor.compile=false",
        "executor._target_=graph_memory.Rerun",
        "attention=sdpa",
    ),
    "programs of layers, bfloat16": (
        "temperature=0",
        "executor=cudagraph",
        "executor.compile=layers",
        "executor._target_=graph_memory.Rerun",
        "attention=sdpa",
        "dtype=bfloat16",
    ),
    "greedy, batches": ("temperature=0", "executor=eager", "batch_size=2", "cache=paged"),
    "blocks, top-k and top-p": ("executor=eager", "verifier=block", "temperature=0.8", "top_k=20", "top_p=0.9"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_run_ends_with_a_verdict(way, traced, monkeypatch, tmp_path):
    """Above temperature 0 the verdict once gave NumPy a tensor of the device, so that every prompt failed on a GPU."""
    monkeypatch.setattr("specbench.executors.layer_programs.LEAST_LAYERS", 1)
    monkeypatch.setattr(ops, "has_triton", lambda: False)  # its interpreter takes most of the time
    with cuda_on_cpu(any_shapes=True):
        answer_for_a_machine(monkeypatch)
        given = ("target=bytes", "drafter=bytes", "device=cuda", "dtype=float32", "data.limit=2", "max_new_tokens=12",
                 "logger=none", *WAYS[way])  # fmt: skip
        result, _ = run(build(check(composed(*given)), lambda text: None), tmp_path)
    assert (
        bool(traced)
        == ("executor.compile=layers" in WAYS[way])
        == bool(result.executor.get("programs", {}).get("used"))
    )
    found = result.lossless
    assert result.counts.prompts == 2
    assert found.detail["tokens"] == found.detail["of_tokens"] == 24 and found.decoder_tv.within
    if "temperature=0" in WAYS[way]:
        assert found.passed and found.detail["equal"] == 2
    else:  # so few tokens show little, but every one of them is looked at
        assert found.statistic > 0 and found.detail["tested"] > 0 and found.detail["impossible"] == 0
