"""Layers that take the place of `nn.Linear` and of embeddings, and hold each weight once.

Layers that multiply the same input, such as q, k and v, share one product of their stacked weights.
"""

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbench.decoding.encoder_input import is_cross_attention
from specbench.decoding.executor import Module, Stored
from specbench.executors.fused_norm import fused_norms
from specbench.executors.linear_kernels import HalfPairs, Product
from specbench.executors.quantized_linear import QuantizedLinear, grid_of

# Names that transformers gives to linear layers of one module with the same input, in the order of their calls.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Layers of state-space models that are not called: others read their weight and bias.
READ_DIRECTLY = ("dt_proj",)

LinearGroup = tuple[nn.Module, tuple[str, ...]]  # the parent of linear layers that share a product, and their names
_numbers = itertools.count()
_by_number: "WeakValueDictionary[int, PackedLinear]" = WeakValueDictionary()

torch.library.define("specbench::product", "(Tensor x, Tensor number, int features) -> Tensor")


@torch.library.impl("specbench::product", "CPU")
def _product(x: Tensor, number: Tensor, features: int) -> Tensor:
    """x [..., in] times the weight of the layer with this number []: [..., features]. Compilers do not look into it,
    and a compiled program is the same for every checkpoint."""
    return _by_number[int(number)].multiply(x)


def _shape(x: Tensor, number: Tensor, features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)


torch.library.register_fake("specbench::product", _shape)


def product_into(x: Tensor, number: Tensor, out: Tensor) -> None:
    """As `_product`, of contiguous x, into `out`."""
    _by_number[int(number)].product.into(x, out)


@functools.cache
def call_directly() -> None:
    """From now on programs are compiled to call `product_into`: the operator takes the host several times longer."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.select_algorithm import ExternKernelChoice

    choice = ExternKernelChoice(product_into, name="specbench_product")

    def lowered(x: Any, number: Any, features: int) -> Any:
        x, number = (ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(t)) for t in (x, number))
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [*x.get_size()[:-1], features])
        return choice.bind([x, number], layout).output_node()

    register_lowering(torch.ops.specbench.product.default, type_promotion_kind=None)(lowered)


class PackedLinear(nn.Module):
    """Multiplies by one weight, which is stored as `scale` times itself: the input is divided by that."""

    number: Tensor
    unscale: Tensor | None

    def __init__(self, product: Product, scale: float, weight: Tensor, bias: Tensor | None):
        """`product` multiplies by the scaled weight [out, in], and adds the bias [out]."""
        super().__init__()
        self.product = product
        self.features, self.bytes = len(weight), product.bytes
        self.numbers = weight.numel() + (0 if bias is None else bias.numel())
        self.weight = weight.new_empty(0)  # some models ask for its dtype
        key = next(_numbers)
        if isinstance(product, HalfPairs):  # it scales the result
            product.factor, scale = 1 / scale, 1.0
        self.register_buffer("number", torch.tensor(key), persistent=False)
        self.register_buffer("unscale", None if scale == 1 else torch.tensor(1 / scale), persistent=False)
        _by_number[key] = self

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        if self.unscale is not None:
            x = x * self.unscale
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.specbench.product(x, self.number, self.features)
            return found
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., in], divided by the scale, to [..., out]."""
        return self.product(x)


class SharedProduct:
    """One product for several layers with the same input, made when the first of them is called."""

    def __init__(self, product: nn.Module, widths: Sequence[int]):
        """`product` takes [..., in] to [..., sum of widths]."""
        self.product, self.widths = product, list(widths)
        self.x: Tensor | None = None
        self.parts: Sequence[Tensor] = ()

    def part(self, x: Tensor, place: int) -> Tensor:
        """The part [..., widths[place]] of the product of x [..., in]."""
        if self.x is not x:
            self.x, self.parts = x, self.product(x).split(self.widths, -1)
        part = self.parts[place]
        if place == len(self.widths) - 1:
            self.x, self.parts = None, ()
        return part


class SharedLinear(nn.Module):
    """Takes the place of one of the layers that share a product. The first of them owns it."""

    def __init__(self, shared: SharedProduct, place: int, weight: Tensor):
        """`weight`, of any shape, has the dtype and device that some models ask for."""
        super().__init__()
        self.shared, self.place, self.weight = shared, place, weight.new_empty(0)
        self.product = shared.product if place == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return self.shared.part(x, self.place)


class PackedEmbedding(nn.Module):
    """Takes the place of an embedding in float32 whose values 16 bits hold."""

    weight: Tensor

    def __init__(self, weight: Tensor):
        """weight [V, H] in 16 bits."""
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] to their embeddings [..., H] in float32."""
        return nn.functional.embedding(tokens, self.weight).float()


def pack_embedding(module: nn.Module) -> None:
    """Stores the input embedding of a model in 16 bits, if it is a plain one in float32 and no value changes."""
    if not isinstance(module, PreTrainedModel):
        return
    found: Any = module.get_input_embeddings()
    if type(found) is not nn.Embedding or found.weight.dtype != torch.float32 or found.max_norm is not None:
        return
    weight = found.weight.detach()
    narrow = (weight.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    if (half := next((w for w in narrow if torch.equal(w.float(), weight)), None)) is not None:
        module.set_input_embeddings(PackedEmbedding(half))


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is a parameter, and none that consists of other tensors, as those of torchao and DTensors do."""
    return isinstance(weight, nn.Parameter) and not hasattr(weight, "__tensor_flatten__")


def linear_groups(module: nn.Module) -> Iterator[LinearGroup]:
    """The linear layers of a module, each once: their parent and names, several where they can share a product."""
    for path, parent in module.named_modules():
        linear = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        names = [name for name, child in linear.items() if is_plain(child.weight)]
        names = [name for name in names if name not in READ_DIRECTLY]
        for siblings in () if is_cross_attention(path) else SIBLINGS:
            alike = {(linear[name].in_features, linear[name].bias is None) for name in siblings if name in names}
            if set(siblings) <= {*names} and len(alike) == 1:
                yield parent, siblings
                names = [name for name in names if name not in siblings]
        yield from ((parent, (name,)) for name in names)


def linear_layers(group: LinearGroup) -> list[nn.Linear]:
    """The layers of a group."""
    parent, names = group
    return [layer for name in names if isinstance(layer := parent.get_submodule(name), nn.Linear)]


def stacked(group: LinearGroup) -> tuple[Tensor, Tensor | None]:
    """The weight [out, in] and bias [out] of the layers of a group, one below the other."""
    layers = linear_layers(group)
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if len(layers) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None


def replace(group: LinearGroup, product: nn.Module) -> None:
    """Puts a product in the place of the layers of a group, of whose stacked weights it is."""
    layers, (parent, names) = linear_layers(group), group
    if len(names) == 1:
        setattr(parent, names[0], product)
        return
    shared = SharedProduct(product, [layer.out_features for layer in layers])
    for place, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, SharedLinear(shared, place, layer.weight))


def with_packed(found: Stored, module: nn.Module) -> Stored:
    """The weights of a module, given those in its parameters."""
    layers = [layer for layer in module.modules() if isinstance(layer, PackedLinear | QuantizedLinear)]
    numbers, held = sum(layer.numbers for layer in layers), sum(layer.bytes for layer in layers)
    return Stored(found.numbers + numbers, found.read + held, found.held + held)


def quantize_in_place(module: nn.Module) -> None:
    """Stores the weights that are on a grid in 4 or 8 bits, where the device has the kernel for them."""
    for group in list(linear_groups(module)):
        grids = {grid_of(layer.weight.detach()) for layer in linear_layers(group)}
        if len(grids) == 1 and (grid := grids.pop()) is not None:
            replace(group, QuantizedLinear(grid, *stacked(group)))


def is_quantized(module: nn.Module) -> bool:
    """Whether some layers hold their weights in 4 or 8 bits."""
    return any(isinstance(layer, QuantizedLinear) for layer in module.modules())


def packed(module: Module) -> Module:
    """A copy of a module in which layers with the same input share one plain product, whose weights the module's own
    layers become views of, and each RMS norm is one kernel; the module itself if it has no such layers. The results may
    differ by rounding. Quantised weights are replaced in the module itself."""
    quantize_in_place(module)
    several = [group for group in linear_groups(module) if len(group[1]) > 1]
    if not several:
        return module
    norms = list(fused_norms(module, linear_layers(several[0])[0].weight.dtype))
    stacks = [_stack(group) for group in several]
    copies: dict[int, Any] = {}
    found = twin_of(module, copies)
    for (parent, names), stack in zip(several, stacks, strict=True):
        replace((copies[id(parent)], names), stack)
    for parent, name, norm in norms:
        setattr(copies[id(parent)], name, norm)
    return found


def twin_of(module: Module, copies: dict[int, Any] | None = None) -> Module:
    """A copy of a module that shares its weights and configs. `copies` gets the copy of each part, by its `id`."""
    copies = {} if copies is None else copies
    configs = (vars(m)["config"] for m in module.modules() if "config" in vars(m))
    copies |= {id(entry): entry for entry in (*module.parameters(), *module.buffers(), *configs)}
    return copy.deepcopy(module, copies)


def _stack(group: LinearGroup) -> nn.Linear:
    """One layer with the weights of several, which become views of its own."""
    (weight, bias), layers = stacked(group), linear_layers(group)
    stack = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    for name, whole in (("weight", weight), ("bias", bias)):
        if whole is not None:
            setattr(stack, name, nn.Parameter(whole, requires_grad=False))
            for layer, part in zip(layers, whole.split([layer.out_features for layer in layers]), strict=True):
                setattr(layer, name, nn.Parameter(part, requires_grad=False))
    return stack.eval()
