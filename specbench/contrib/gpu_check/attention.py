"""Phase 2: what attention costs by kernel, mask and number of keys, and what its first call costs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from specbench.contrib.gpu_check.check import Number, Phase
from specbench.contrib.gpu_check.fixtures import Lab
from specbench.contrib.gpu_check.timer import Timer
from specbench.kernels import has_triton
from specbench.models import kernel_attention

HEADS, KV_HEADS, SIZE = 24, 8, 128  # of the 3B shape
COLUMNS = (128, 1024, 4096)
QUERIES = (1, 6)
FIRST_CALL = 5e-3  # seconds; plans that are made for each length take 20 to 40 ms


class Attention(Phase):
    """One layer's attention by PyTorch, and by the Triton kernel."""

    number, title, seconds = 2, "attention of one layer", 30
    meaning = (
        "Backends that take no mask, or copy keys for each query head, are slow in ways that depend on the mask. The "
        "first call at a new length must not make a plan: a decoder meets a new length in every round."
    )

    def prepare(self, lab: Lab) -> torch.device:
        return lab.device

    def measure(self, prepared: torch.device, timer: Timer) -> Iterator[Number]:
        before = torch.backends.cuda.cudnn_sdp_enabled()
        try:
            for cudnn in (False, True):
                torch.backends.cuda.enable_cudnn_sdp(cudnn)
                yield from self._backend(prepared, timer, cudnn)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
        if has_triton():
            yield from self._triton(prepared, timer)

    def _triton(self, device: torch.device, timer: Timer) -> Iterator[Number]:
        """The kernel that `attention=auto` uses; the caches of all lengths have the most columns."""
        table = torch.zeros(1, 1, dtype=torch.long, device=device)
        for columns in COLUMNS:
            for queries in QUERIES:
                q, *_ = tensors(device, queries, queries, "none")
                k, v = (torch.ones(1, KV_HEADS, max(COLUMNS), SIZE, dtype=q.dtype, device=device) for _ in range(2))
                first = torch.full((1,), columns - queries, device=device)
                given = (q, k, v, table, first, None, None, SIZE**-0.5, None)
                seconds = timer.device(lambda given=given: kernel_attention.attend_op(*given))  # type: ignore[misc]
                yield Number(f"{queries} x {columns:,}, Triton kernel", seconds * 1e6, "us", None)

    def _backend(self, device: torch.device, timer: Timer, cudnn: bool) -> Iterator[Number]:
        word, worst = "cuDNN on" if cudnn else "cuDNN off", 0.0
        attend(*tensors(device, 1, 256, "none"))  # the library is loaded
        for columns in COLUMNS:
            for queries in QUERIES:
                for mask in ("bool", "bias", "none"):
                    given = tensors(device, queries, columns, mask)
                    first = timer.wall(lambda given=given: attend(*given))  # type: ignore[misc]
                    again = timer.device(lambda given=given: attend(*given))  # type: ignore[misc]
                    worst = max(worst, first)
                    where = f"{queries} x {columns:,}, mask {mask}, {word}"
                    yield Number(where, again * 1e6, "us", None, f"first call {first * 1e6:,.0f} us")
        limit = None if cudnn else ("<=", FIRST_CALL * 1e3)
        yield Number(f"longest first call, {word}", worst * 1e3, "ms", limit)


def tensors(device: torch.device, queries: int, columns: int, mask: str) -> tuple[Any, ...]:
    """q [1, 24, N, 128], k and v [1, 8, T, 128], and a mask [1, 1, N, T] or None: a chain at the end of T columns."""
    q = torch.ones(1, HEADS, queries, SIZE, dtype=torch.bfloat16, device=device)
    k, v = (torch.ones(1, KV_HEADS, columns, SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    if mask == "none":
        return q, k, v, None
    own = torch.arange(columns - queries, columns, device=device)[:, None]
    seen = (torch.arange(columns, device=device) <= own)[None, None]
    if mask == "bool":
        return q, k, v, seen
    return q, k, v, torch.zeros(seen.shape, dtype=q.dtype, device=device).masked_fill(seen.logical_not(), -torch.inf)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Grouped-query attention as PyTorch chooses to compute it."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
