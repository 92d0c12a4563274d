"""Layers that take the place of `nn.Linear`: each holds one product, or several for different numbers of rows.

Layers that multiply the same input, such as q, k and v, share one product of their stacked weights.
"""

import copy
import itertools
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from specbench.executors.linear_kernels import Product

# Names that transformers gives to linear layers of one module with the same input, in the order of their calls.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Names that it gives to the attention to an encoder's outputs, whose keys and values have another input than q.
CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "crossattention")

# Layers of state-space models that are not called: others read their weight and bias.
READ_DIRECTLY = ("dt_proj",)

Module = TypeVar("Module", bound=nn.Module)
Group = tuple[nn.Module, tuple[str, ...]]  # the parent of linear layers that share a product, and their names
_numbers = itertools.count()
_by_number: dict[int, "Choices"] = {}  # of every multiplier that exists

torch.library.define("specbench::product", "(Tensor x, Tensor number, int features) -> Tensor")


@torch.library.impl("specbench::product", "CPU")
def _product(x: Tensor, number: Tensor, features: int) -> Tensor:
    """x [..., in] times the weight of the multiplier with this number []: [..., features]. Compilers do not look into
    it, and a compiled program is the same for every checkpoint."""
    return _by_number[int(number)](x)


def _shape(x: Tensor, number: Tensor, features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)


torch.library.register_fake("specbench::product", _shape)


class Choices:
    """The product that was chosen for each number of rows."""

    def __init__(self, products: Sequence[Product], limits: Sequence[float]):
        """products[i] serves up to limits[i] rows, in order; the last one has no limit."""
        self.products, self.limits = products, limits
        self.only = products[0] if len(set(products)) == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if self.only is not None:
            return self.only(x)
        return self.products[bisect_left(self.limits, x.numel() // x.shape[-1])](x)


class Multiplier(nn.Module):
    """Multiplies by one weight, which is stored as `scale` times itself: the input is divided by that."""

    number: Tensor
    unscale: Tensor | None

    def __init__(self, choices: Choices, scale: float, weight: Tensor):
        """`choices` multiply by the scaled weight [out, in], which is not kept."""
        super().__init__()
        self.choices, self.features, self.numbers = choices, len(weight), weight.numel()
        self.weight = weight.new_empty(0)  # some models ask for its dtype
        key = next(_numbers)
        self.register_buffer("number", torch.tensor(key), persistent=False)
        self.register_buffer("unscale", None if scale == 1 else torch.tensor(1 / scale), persistent=False)
        _by_number[key] = choices
        weakref.finalize(self, _by_number.pop, key)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if self.unscale is not None:
            x = x * self.unscale
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.specbench.product(x, self.number, self.features)
            return found
        return self.choices(x)

    @property
    def products(self) -> list[Product]:
        """The different products that it holds."""
        return list(dict.fromkeys(self.choices.products))


class Shared:
    """One product for several layers with the same input, made when the first of them is called."""

    def __init__(self, multiplier: nn.Module, widths: Sequence[int]):
        """`multiplier` takes [..., in] to [..., sum of widths]."""
        self.multiplier, self.widths = multiplier, list(widths)
        self.x: Tensor | None = None
        self.parts: Sequence[Tensor] = ()

    def part(self, x: Tensor, place: int) -> Tensor:
        """The part [..., widths[place]] of the product of x [..., in]."""
        if self.x is not x:
            self.x, self.parts = x, self.multiplier(x).split(self.widths, -1)
        part = self.parts[place]
        if place == len(self.widths) - 1:
            self.x, self.parts = None, ()
        return part


class Part(nn.Module):
    """Takes the place of one of the layers that share a product. The first of them owns the multiplier."""

    def __init__(self, shared: Shared, place: int, weight: Tensor):
        """`weight`, of any shape, has the dtype and device that some models ask for."""
        super().__init__()
        self.shared, self.place, self.weight = shared, place, weight.new_empty(0)
        self.multiplier = shared.multiplier if place == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return self.shared.part(x, self.place)


def groups_of(module: nn.Module) -> Iterator[Group]:
    """The linear layers of a module, each once: their parent and names, several where they can share a product."""
    for path, parent in module.named_modules():
        linear = [(name, child) for name, child in parent.named_children() if type(child) is nn.Linear]
        names = [name for name, child in linear if type(child.weight) is nn.Parameter and name not in READ_DIRECTLY]
        for siblings in () if is_cross_attention(path) else SIBLINGS:
            if all(name in names for name in siblings) and _same_kind([parent.get_submodule(n) for n in siblings]):
                yield parent, siblings
                names = [name for name in names if name not in siblings]
        yield from ((parent, (name,)) for name in names)


def is_cross_attention(path: str) -> bool:
    """Whether the module at a path attends to the outputs of an encoder."""
    return path.rpartition(".")[2] in CROSS_ATTENTION


def _same_kind(layers: Sequence[nn.Module]) -> bool:
    """Whether the weights can be stacked: one input, all with a bias or none."""
    return len({(layer.in_features, layer.bias is None) for layer in layers if isinstance(layer, nn.Linear)}) == 1


def stacked(parent: nn.Module, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """The weight [out, in] and bias [out] of these layers, one below the other."""
    layers = [parent.get_submodule(name) for name in names]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(linear) == 1:
        return linear[0].weight.detach(), None if linear[0].bias is None else linear[0].bias.detach()
    biases = [layer.bias.detach() for layer in linear if layer.bias is not None]
    return torch.cat([layer.weight.detach() for layer in linear]), torch.cat(biases) if biases else None


def replace(parent: nn.Module, names: Sequence[str], multiplier: nn.Module) -> None:
    """Puts a multiplier in the place of these layers, of whose weights it holds the product."""
    layers = [parent.get_submodule(name) for name in names]
    widths = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    if len(names) == 1:
        setattr(parent, names[0], multiplier)
        return
    shared = Shared(multiplier, widths)
    for place, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, Part(shared, place, layer.get_parameter("weight")))


def packed(module: Module) -> Module:
    """A copy of a module in which layers with the same input share one plain product. The weights are those of the
    module itself, whose layers become views of the stacked ones: nothing is held twice. One product of stacked weights
    may round otherwise than several. Returns the module if it has no such layers."""
    several = [(parent, names) for parent, names in groups_of(module) if len(names) > 1]
    if not several:
        return module
    stacks = [_stack(parent, names) for parent, names in several]
    kept = [
        *module.parameters(),
        *module.buffers(),
        *(vars(m)["config"] for m in module.modules() if "config" in vars(m)),
    ]
    copies = {id(entry): entry for entry in kept}
    found = copy.deepcopy(module, copies)
    for (parent, names), stack in zip(several, stacks, strict=True):
        replace(copies[id(parent)], names, stack)
    return found


def _stack(parent: nn.Module, names: Sequence[str]) -> nn.Linear:
    """One layer with the weights of several, which become views of its own."""
    weight, bias = stacked(parent, names)
    layers = [parent.get_submodule(name) for name in names]
    widths = [len(layer.get_parameter("weight")) for layer in layers]
    stack = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    for name, whole in (("weight", weight), ("bias", bias)):
        if whole is not None:
            setattr(stack, name, nn.Parameter(whole, requires_grad=False))
            for layer, part in zip(layers, whole.split(widths), strict=True):
                setattr(layer, name, nn.Parameter(part, requires_grad=False))
    return stack.eval()
