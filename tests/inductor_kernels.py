"""The kernels that TorchInductor makes of a model on CUDA, counted on a machine without a GPU.

    python tests/inductor_kernels.py 1b
    python tests/inductor_kernels.py 1b cubins

Inductor writes its Triton code from shapes alone. Only what it asks of the device is answered here in its place, and it
is stopped before the code is compiled. Run it in a process of its own: the answers hold for all of it. Prints one JSON
document: for each leaf and number of layers the calls of one program, in order; or for each kernel of the programs of
one layer, in every configuration that Inductor tries, what it takes of an A100 and an H100: see `cubins`.
"""

import json
import re
import sys
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.graph
import torch.utils._triton
from fake_cuda import fake_cuda, on_cuda
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.cache.static import StaticCache
from specbench.decoding.executor import Executor
from specbench.decoding.rows import Rows
from specbench.decoding.sampling import Sampling
from specbench.drafters.model import ModelDrafter
from specbench.executors import packed_linear
from specbench.executors.compile_cache import Programs
from specbench.executors.compiled_function import Leaf
from specbench.executors.cudagraph import CudaGraphExecutor
from specbench.executors.layer_programs import LEAST_LAYERS, LayerPrograms
from specbench.executors.pytree import flatten_arguments
from specbench.executors.quant_grids import INT4
from specbench.models.language_model import LanguageModel

aten = torch.ops.aten
COLUMNS, VOCABULARY = 1024, 128256
SHAPES = {  # of Llama's layers
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "head_dim": 128},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "head_dim": 128},
}
CALL = re.compile(r"^\s+(?:\w+ = )?(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', \'\'\'(.*?)\'\'\'", re.DOTALL)
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=80 << 30,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
)  # fmt: skip
ANSWERS = {
    "is_available": True, "device_count": 1, "current_device": 0, "is_bf16_supported": True,
    "get_device_properties": H100, "get_compute_capability": 90,
}  # fmt: skip
# No worker processes; and constants are not folded, since that would compute them on the device.
SETTINGS = {"compile_threads": 1, "force_disable_caches": True, "joint_graph_constant_folding": False}


class WrittenError(Exception):
    """Inductor has written its program."""


def answer(value: Any) -> Any:
    return staticmethod(lambda *args, **options: value)


def answer_for_the_device() -> list[str]:
    """Answers what Inductor asks of an H100. Returns the list of the programs that it will write."""
    for name, value in ANSWERS.items():
        setattr(CudaInterface, name, answer(value))
    for name in ("current_device", "get_device_properties"):
        setattr(CudaInterface.Worker, name, answer(ANSWERS[name]))
    torch.cuda.get_device_properties = lambda device=None: H100
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.utils._triton.triton_hash_with_backend = lambda: "none"
    PythonWrapperCodegen.generate_and_run_autotune_block = lambda self: None  # times kernels
    programs: list[str] = []

    def save(code: str) -> None:
        programs.append(code)
        raise WrittenError

    torch._inductor.graph.GraphLowering.save_output_code = staticmethod(save)
    return programs


class OneKernelAttention(TorchFunctionMode):
    """Attention as PyTorch chooses it on CUDA where there is a mask: the memory-efficient kernel, with the mask as
    numbers. Builds without CUDA would choose the plain products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return efficient(*args, **kwargs)
        return func(*args, **(kwargs or {}))


def efficient(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, dropout_p: float = 0.0, scale: float | None = None, **_: Any
) -> Tensor:
    bias = attn_mask.expand(*q.shape[:3], k.shape[2])  # numbers on CUDA: `attention_mask.aligned_bias`
    found: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, dropout_p, False, scale=scale)[0]
    return found


def empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def model(layers: int, executor: Executor, attention: str = "sdpa", shape: str = "1b") -> LanguageModel:
    """A model with layers of a shape, with an empty cache of one row."""
    config = LlamaConfig(
        **SHAPES[shape], num_hidden_layers=layers, num_key_value_heads=8, vocab_size=VOCABULARY,
        max_position_embeddings=131072, tie_word_embeddings=shape in ("1b", "3b"), attn_implementation="sdpa",
    )  # fmt: skip
    module = on_cuda(lambda given: executor.load(LlamaForCausalLM(given)), config).requires_grad_(False)
    for layer in module.modules():
        if isinstance(layer, packed_linear.SharedLinear | packed_linear.QuantizedLinear):
            layer.weight = torch.empty(0, dtype=torch.bfloat16, device="cuda")  # no parameter, so it is on "meta"
    made = LanguageModel(
        module, None, name="", sampling=Sampling(), new_cache=StaticCache, executor=Executor(), attention=attention
    )
    made.allocate(1, COLUMNS)
    made.forward(empty(1, 2), empty(1), COLUMNS, keep_logits=1)  # the cache takes its shape
    return made


def score(of: LanguageModel, guesses: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The target's call on so many guesses of a chain."""
    rows = Rows(empty(1, COLUMNS), empty(1), empty(1), empty(1, dtype=torch.bool), empty(3, 1, COLUMNS), empty(2))
    return of._score_draft, (rows, empty(1, guesses), COLUMNS, (1,) * guesses, None, None)


def step(of: LanguageModel) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of the drafter."""
    drafter = ModelDrafter(of, VOCABULARY, 5)
    return drafter._step, (empty(1, 1), empty(1), (), empty(1), None, COLUMNS, None)


def program(of: LanguageModel, function: Callable[..., Any], arguments: tuple[Any, ...], written: list[str]) -> str:
    """The program that Inductor writes for this call."""
    written.clear()
    leaf = Leaf(function, of, Programs(None), compiles=True)
    leaf.weights = dict([*of.module.named_parameters(), *of.module.named_buffers()])
    try:
        leaf._compile(None, *flatten_arguments(arguments), of.cache_tensors())
    except Exception:  # WrittenError, as Inductor passes it on
        if not written:
            raise
    (code,) = written  # one program: there is no graph break
    assert "_cpu(" not in code and "device='cpu'" not in code, "the program uses the host"
    return code


def layer_program(guesses: int, written: list[str], shape: str = "1b") -> str:
    """The program of one layer of a shape, for the target's call on so many guesses."""
    of, layers = model(LEAST_LAYERS, CudaGraphExecutor(), "triton", shape), LayerPrograms(Programs(None), graphs=True)
    layers.attach(of.module)
    layers.start()
    written.clear()
    function, arguments = score(of, guesses)
    with layers.in_graph():
        function(*arguments)
    (code,) = written  # one program for all layers
    assert "_cpu(" not in code and "device='cpu'" not in code, "the program uses the host"
    return code


def calls(code: str) -> list[str]:
    """The kernels and library functions that the program calls, in order."""
    return CALL.findall(code[code.index("def call(") :])


def cubins(shape: str) -> list[list[Any]]:
    """For each kernel of the programs of one layer, on 5 tokens and on one, for both GPUs: name, capability, registers
    of a thread, bytes of its stack, bytes of a program's shared memory."""
    from compile_triton import resources
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    written, found = answer_for_the_device(), []
    triton_helpers.set_driver_to_gpu = lambda: None
    settings = SETTINGS | {"use_static_triton_launcher": False}  # whose kernels keep no cubin
    with fake_cuda(), OneKernelAttention(), torch._inductor.config.patch(SETTINGS):
        programs = [layer_program(guesses, written, shape) for guesses in (4, 0)]
    sources = dict.fromkeys(kernel for program in programs for kernel in KERNEL.findall(program))
    for capability, (name, text) in product((80, 90), sources):
        target = GPUTarget("cuda", capability, 32)
        driver.set_active(SimpleNamespace(get_current_target=lambda target=target: target))
        text = text.replace("cc=90, major=9", f"cc={capability}, major={capability // 10}")
        with torch._inductor.config.patch(settings):
            kernel = getattr(PyCodeCache.load(text), name)
            kernel.precompile(warm_cache_only=True)
        for made in (one.kernel for one in kernel.compile_results):
            found.append([name, capability, *resources(made.asm["cubin"]), made.metadata.shared])
    return found


def main(shape: str) -> dict[str, dict[int, list[str]]]:
    """The calls by leaf and number of layers. "kernel" and "kernel step" are with the attention kernel. Of the shape
    "1b" also "unpacked", the target's call without shared products, "score" and "step", which are without the kernel,
    "int4", the target's call with it and weights in 4 bits, and "layer" and "layer step", programs of one layer."""
    written = answer_for_the_device()
    names = ("score", "step", "unpacked", "kernel", "kernel step", "int4")
    found: dict[str, dict[int, list[str]]] = {name: {} for name in names}
    with fake_cuda(), OneKernelAttention(), torch._inductor.config.patch(SETTINGS):
        for layers in (2, 3):
            of = model(layers, CudaGraphExecutor(), "triton", shape)
            found["kernel"][layers] = calls(program(of, *score(of, 4), written))
            found["kernel step"][layers] = calls(program(of, *step(of), written))
            if shape != "1b":
                continue
            of = model(layers, CudaGraphExecutor())
            found["score"][layers] = calls(program(of, *score(of, 5), written))
            found["step"][layers] = calls(program(of, *step(of), written))
            with mock.patch.object(packed_linear, "grid_of", lambda weight: INT4):
                of = model(layers, CudaGraphExecutor(), "triton")
            found["int4"][layers] = calls(program(of, *score(of, 4), written))
        if shape == "1b":
            found |= {name: {1: calls(layer_program(n, written))} for name, n in (("layer", 4), ("layer step", 0))}
            of = model(2, Executor())
            found["unpacked"][2] = calls(program(of, *score(of, 5), written))
    return found


if __name__ == "__main__":
    json.dump((cubins if sys.argv[2:] else main)(sys.argv[1]), sys.stdout)
