"""A converted module's forward: gives OpenVINO the tensors of a call in place, and stores the new keys and values.

b rows, N new tokens, K of them with logits, T columns, V vocabulary.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specbench.contrib.openvino.graph import Converted, runtime

SPARE = 2  # a cache with more columns than this many times the visible ones is copied up to the visible ones


class OpenVINOProgram:
    """Takes the place of a module's `forward`, with the arguments that the model adapter calls it with."""

    def __init__(self, module: Any, converted: Converted):
        """`module` gives the embeddings, and the output matrix whose hooks see the hidden states."""
        self.module, self.converted, self.request = module, converted, converted.request
        self.openvino = runtime()
        self.embed, self.head = module.get_input_embeddings(), module.get_output_embeddings()
        self.given: dict[int, Tensor] = {}  # inputs as they were last set: OpenVINO does not keep their memory
        self.keep: dict[tuple[int, int], Tensor] = {}
        self.first = 4 + max(1, len(converted.masks))  # the first input with keys

    def __call__(
        self,
        *,
        position_ids: Tensor,
        attention_mask: Any,
        cache: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        """Logits [b, K, V] of tokens input_ids [b, N] or embeddings inputs_embeds [b, N, H], at position_ids [b, N],
        with masks [b, 1, N, visible] bool. Raises ValueError for other masks."""
        kinds = self.converted.masks
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        masks = [attention_mask[kind] for kind in kinds] if kinds else [attention_mask]
        if any(mask.dtype != torch.bool for mask in masks):
            raise ValueError("executor=openvino takes masks of booleans")
        keep = self._keep(x.shape[1], logits_to_keep)
        # Where the new tokens' columns stand among those that are read.
        slots = cache.slots if cache.near is None else torch.searchsorted(cache.near, cache.slots)
        for place, tensor in enumerate((x, position_ids, slots, keep, *masks)):
            self._give(place, tensor.contiguous())
        stored = self._give_cache(cache)
        logits = torch.empty(len(x), len(keep), self.converted.vocab_size, dtype=self.converted.dtype)
        self.request.set_output_tensor(0, self._shared(logits))
        self.request.infer()
        for hook in self.head._forward_pre_hooks.values():
            hook(self.head, (self._output(1).clone(),))
        for place, tensor in enumerate(stored):
            cache.write(tensor, self._output(2 + place))
        return SimpleNamespace(logits=logits)

    def _keep(self, tokens: int, logits_to_keep: int) -> Tensor:
        """The last `logits_to_keep` of so many tokens, or with 0 all of them: [K]."""
        key = (tokens, logits_to_keep)
        if key not in self.keep:
            self.keep[key] = torch.arange(tokens)[-logits_to_keep:]
        return self.keep[key]

    def _give_cache(self, cache: Any) -> list[Tensor]:
        """Gives all keys and values; returns the cache's own tensors, in the backend's shapes."""
        if not cache.tensors():  # a new one: frees the memory of the one before
            for place in range(self.first, self.first + 2 * len(self.converted.layers)):
                self.given.pop(place, None)
        pairs = [cache.stored(layer, *like) for layer, like in enumerate(self.converted.layers)]
        stored = [tensor for pair in pairs for tensor in pair]
        for place, tensor in enumerate(stored, self.first):
            self._give(place, whole_columns(cache.read(tensor)))
        return stored

    def _give(self, place: int, tensor: Tensor) -> None:
        """Sets an input, unless it is set to the same memory already."""
        before = self.given.get(place)
        if before is None or before.data_ptr() != tensor.data_ptr() or before.shape != tensor.shape:
            self.request.set_input_tensor(place, self._shared(tensor))
            self.given[place] = tensor

    def _shared(self, tensor: Tensor) -> Any:
        """A contiguous tensor of any shape as OpenVINO's, on the same memory."""
        if tensor.dtype == torch.bfloat16:  # numpy has no such type
            bits = tensor.detach().view(torch.int16).numpy()
            return self.openvino.Tensor(bits, self.openvino.Shape(tensor.shape), self.openvino.Type.bf16)
        return self.openvino.Tensor(tensor.detach().numpy(), shared_memory=True)

    def _output(self, index: int) -> Tensor:
        """An output of the last call, of any shape; the next call overwrites it."""
        tensor = torch.from_numpy(self.request.get_output_tensor(index).data)
        return tensor.view(self.converted.dtype)


def whole_columns(columns: Tensor) -> Tensor:
    """The tensor [b, heads, T, head size] that columns [b, heads, visible, head size] are the first of, where that
    needs no copy and T is not much larger; else a copy of the columns."""
    b, heads, visible, size = columns.shape
    dense = columns.stride(1) // size  # columns of a head in memory
    strides = (heads * dense * size, dense * size, size, 1)
    is_cut = columns.stride()[1:] == strides[1:] and (b == 1 or columns.stride(0) == strides[0])
    if is_cut and visible <= dense <= SPARE * visible:
        return columns.as_strided((b, heads, dense, size), strides)
    return columns.contiguous()
