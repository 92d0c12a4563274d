"""The default executor: linear layers use oneDNN weights that are laid out once, when the model is loaded.

At the few tokens of a decoding step a linear layer is as fast as its weight can be read; on some processors the plain
product is 2 to 3 times slower. Nothing is compiled, so there is no warm-up.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specbench.decoding.executor import Executor, Module

# Rows of x that the layout is made for. 16 was the fastest, or equal, for 1 to 512 rows.
ROWS = 16
# Bytes. Weights below this stay in the caches of the processor, where the plain product is faster.
SMALLEST_BYTES = 16e6

_product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default


@torch.library.custom_op("specbench::packed_linear", mutates_args=())
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times a packed weight [out, in], plus bias [out]: [..., out]. One operation that compilers do not
    look into."""
    return _product(x, weight, bias, "none", [], "")


@packed_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear`, whose own weight is not kept."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if torch.compiler.is_compiling():
            product: Tensor = packed_linear(x, self.packed, self.bias)
            return product
        return _product(x, self.packed, self.bias, "none", [], "")


class PrepackedExecutor(Executor):
    """Eager mode on packed weights, for float32 models on a CPU with oneDNN; elsewhere plain eager mode."""

    changes_modules = True

    def __init__(self) -> None:
        self.packed_bytes = 0

    def load(self, module: Module) -> Module:
        """Packs every linear layer of a module with at least SMALLEST_BYTES in them. A weight that is also the
        embedding exists twice from then on."""
        weight = next(module.parameters())
        if self._packs(weight.device, weight.dtype):
            total = sum(m.weight.nbytes for m in module.modules() if type(m) is nn.Linear)
            if total >= SMALLEST_BYTES:
                self._replace(module, {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)})
        return module

    @staticmethod
    def _packs(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()

    def weights(self, module: nn.Module) -> list[Tensor]:
        packed = [layer.packed for layer in module.modules() if isinstance(layer, PackedLinear)]
        return [*module.parameters(), *packed]

    def doubles(self, weights: int, tied: int, device: torch.device, dtype: torch.dtype) -> int:
        return tied if self._packs(device, dtype) and weights >= SMALLEST_BYTES else 0

    def _replace(self, parent: nn.Module, shared: set[int]) -> None:
        """Packs one layer after the other, so that no more than one weight exists twice meanwhile."""
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                self.packed_bytes += child.weight.nbytes if id(child.weight) in shared else 0
                setattr(parent, name, PackedLinear(child))
            else:
                self._replace(child, shared)

    def bytes(self) -> int:
        """Bytes of weights that exist twice, because an embedding is tied to a packed layer."""
        return self.packed_bytes
