"""Layers that take the place of `nn.Linear`: each holds one product, or several for different numbers of rows.

Layers that multiply the same input, such as q, k and v, share one product of their stacked weights.
"""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specbench.executors.products import Product

# Names that transformers gives to linear layers of one module with the same input, in the order of their calls.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_numbers = itertools.count()
_by_number: "weakref.WeakValueDictionary[int, Multiplier]" = weakref.WeakValueDictionary()

torch.library.define("specbench::product", "(Tensor x, Tensor number, int features) -> Tensor")


@torch.library.impl("specbench::product", "CPU")
def _product(x: Tensor, number: Tensor, features: int) -> Tensor:
    """x [..., in] times the weight of the multiplier with this number []: [..., features]. Compilers do not look into
    it, and a compiled program is the same for every checkpoint."""
    return _by_number[int(number)].now(x)


@torch.library.register_fake("specbench::product")
def _(x: Tensor, number: Tensor, features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)


@dataclass(frozen=True)
class Choice:
    """The product that is used for up to `rows` rows."""

    rows: float
    product: Product


class Multiplier(nn.Module):
    """Multiplies by one weight, with the product that was chosen for the number of rows."""

    number: Tensor

    def __init__(self, choices: Sequence[Choice], out: int, inputs: int):
        """`choices` in order of their rows, the last one without a limit; the weight is [out, inputs]."""
        super().__init__()
        self.choices, self.features, self.numbers = choices, out, out * inputs
        key = next(_numbers)
        self.register_buffer("number", torch.tensor(key), persistent=False)
        _by_number[key] = self

    def now(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], with the chosen product."""
        rows = x.numel() // x.shape[-1]
        for choice in self.choices:
            if rows <= choice.rows:
                return choice.product(x)
        raise AssertionError("the last choice has no limit")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.specbench.product(x, self.number, self.features)
            return found
        return self.now(x)

    @property
    def products(self) -> list[Product]:
        """The different products that it holds."""
        return list(dict.fromkeys(choice.product for choice in self.choices))


class Shared:
    """One product for several layers with the same input, made when the first of them is called."""

    def __init__(self, multiplier: Multiplier, widths: Sequence[int]):
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

    def __init__(self, shared: Shared, place: int):
        super().__init__()
        self.shared, self.place = shared, place
        self.multiplier = shared.multiplier if place == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return self.shared.part(x, self.place)


def groups_of(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """The linear layers of a module, each once: their parent and names, several where they can share a product."""
    for parent in module.modules():
        names = [name for name, child in parent.named_children() if type(child) is nn.Linear]
        for siblings in SIBLINGS:
            if all(name in names for name in siblings) and _same_kind([parent.get_submodule(n) for n in siblings]):
                yield parent, siblings
                names = [name for name in names if name not in siblings]
        yield from ((parent, (name,)) for name in names)


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


def replace(parent: nn.Module, names: Sequence[str], multiplier: Multiplier) -> None:
    """Puts a multiplier in the place of these layers, of whose weights it holds the product."""
    layers = [parent.get_submodule(name) for name in names]
    widths = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    if len(names) == 1:
        setattr(parent, names[0], multiplier)
        return
    shared = Shared(multiplier, widths)
    for place, name in enumerate(names):
        setattr(parent, name, Part(shared, place))
