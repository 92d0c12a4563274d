"""Linear layers on a CPU that read weights in 16 bits, as checkpoints have them, and compute in float32."""

import copy
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specbench.executors.base import Module
from specbench.executors.machine import cache_dir, cpu_features
from specbench.kernels import half_pairs

log = logging.getLogger(__name__)
HALF_EXPONENT = 15  # of the largest weight in float16, after scaling
BLOCK = 2**17  # numbers of a weight that are compared at once
# Layers of state-space models that are not called: others read their weight and bias.
READ_DIRECTLY = ("dt_proj",)


class HalfLinear(nn.Module):
    """Takes the place of a linear layer in float32 whose weight, times a power of two, float16 holds exactly."""

    def __init__(self, packed: Tensor, bias: Tensor | None, factor: float):
        super().__init__()
        self.packed, self.bias, self.factor = nn.Parameter(packed, requires_grad=False), bias, factor
        self.weight = torch.empty(0)  # some models ask for its dtype
        self.out_features = half_pairs.PAIR * len(packed)

    def forward(self, x: Tensor, gain: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """x [..., K] to [..., N]; with a gain [K], of x over the root of its mean square plus eps, times gain."""
        found: Tensor = torch.ops.specbench.half_pairs.default(x, self.packed, self.bias, self.factor, gain, eps)
        return found


def half_linear(layer: nn.Linear, scale: float) -> HalfLinear:
    """A linear layer whose weight, times `scale`, float16 holds exactly."""
    return HalfLinear(half_pairs.packed(layer.weight.detach() * scale), layer.bias, 1 / scale)


@torch.no_grad()
def joined(parts: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """One product in place of several of one input, all with biases or none: its columns are theirs beside each other,
    and its weight is where theirs are from now on. The parts themselves if that would change a value."""
    halves = [part for part in parts if isinstance(part, HalfLinear)]
    if len(halves) < len(parts):
        return tuple(parts)
    factor = max(part.factor for part in halves)
    packed = [part.packed * (part.factor / factor) for part in halves]
    if not all(torch.equal(p * (factor / part.factor), part.packed) for p, part in zip(packed, halves, strict=True)):
        return tuple(parts)
    if not _beside([part.packed for part in halves]):  # as those of a module that shares them may be
        for part, own in zip(halves, torch.cat(packed).split([len(p) for p in packed]), strict=True):
            part.packed, part.factor = nn.Parameter(own, requires_grad=False), factor
    first, biases = halves[0].packed, [part.bias for part in halves if part.bias is not None]
    whole = first.as_strided((sum(map(len, packed)), *first.shape[1:]), first.stride())
    return (HalfLinear(whole, torch.cat(biases) if biases else None, factor),)


def _beside(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins in memory where the one before it ends."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors[:-1]]
    return len(storages) == 1 and ends == [tensor.data_ptr() for tensor in tensors[1:]]


def with_half_weights(module: Module) -> Module:
    """A copy of a module on a CPU in which linear layers read their weights in 16 bits, where no value changes; the
    module itself if there is no such layer, or no C++ compiler."""
    layers = {path: layer for path, layer in module.named_modules() if may_be_half(path, layer)}
    scales = {path: scale_of(layer.weight.detach()) for path, layer in layers.items()}
    scales = {path: scale for path, scale in scales.items() if is_half(layers[path].weight.detach() * scale)}
    if not scales:
        return module
    if not half_pairs.load_operator(cache_dir() / "kernels" / cpu_features()):
        log.warning("weights are read in 32 bits, which takes longer: no C++ compiler can make half_pairs, see run.log")
        return module
    found = twin_of(module)
    for path, scale in scales.items():
        parent, _, name = path.rpartition(".")
        found.get_submodule(parent).register_module(name, half_linear(layers[path], scale))
    return found


def may_be_half(path: str, layer: nn.Module) -> bool:
    """Whether a part of a model is a linear layer of a shape that `half_pairs` takes."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:  # torchao's are of other classes
        return False
    if path.rpartition(".")[2] in READ_DIRECTLY:
        return False
    rows, columns = layer.weight.shape
    float32 = layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
    return float32 and rows % half_pairs.PAIR == 0 and columns % half_pairs.LINE == 0 and layer.weight.numel() > 0


def is_half(weight: Tensor) -> bool:
    """Whether float16 has all values of a weight in float32. Read in blocks that stay in a core's cache."""
    return all(torch.equal(block.half().float(), block) for block in weight.reshape(-1).split(BLOCK))


def scale_of(weight: Tensor) -> float:
    """The power of two, which changes no digit, that brings a weight's largest value to the end of float16's range."""
    largest = float(torch.stack(weight.aminmax()).abs().max())
    return 2.0 ** (HALF_EXPONENT - math.frexp(largest)[1]) if 2.0**-60 < largest < 2.0**60 else 1.0


def twin_of(module: Module) -> Module:
    """A copy of a module that shares its weights and configs."""
    configs = (vars(part)["config"] for part in module.modules() if "config" in vars(part))
    shared = (*module.parameters(), *module.buffers(), *configs)
    return copy.deepcopy(module, {id(entry): entry for entry in shared})
