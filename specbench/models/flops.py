"""Multiply-adds and bytes of weights per token, for the ratio c_hat of Definition 3.10 and for the bandwidth."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specbench.decoding import processes
from specbench.decoding.executor import Executor
from specbench.executors.packed_linear import is_cross_attention
from specbench.models.experts import idle_experts

INPUT_SIDE = ("k", "v", "k_proj", "v_proj")  # what makes keys and values of an encoder's outputs, once a request


def per_token(module: PreTrainedModel, executor: Executor) -> tuple[int, int]:
    """Multiply-adds with the weights of a module in a forward of one token (Definition 3.10), and bytes of weights that
    this process reads for it. An embedding that is not also the output matrix is looked up, not multiplied; experts
    that the token is not routed to are not read. Of an encoder-decoder only the decoder runs in a step."""
    if module.config.is_encoder_decoder:
        return _of_decoder(module, executor)
    head: Any = module.get_output_embeddings()
    embedding: Any = module.get_input_embeddings()
    stored = executor.stored(module)
    numbers, held = idle_experts(module)
    if not any(weight is embedding.weight for weight in head.parameters()):
        numbers, held = (
            numbers + embedding.weight.numel(),
            held + processes.current.local_shard(embedding.weight).nbytes,
        )
    return round(stored.numbers - numbers), round(stored.read - held)


def _of_decoder(module: Any, executor: Executor) -> tuple[int, int]:
    """`per_token` of a module with an encoder."""
    head, decoder = module.get_output_embeddings(), module.get_decoder()
    heads = [id(weight) for weight in head.parameters()]
    crossing = (part for path, part in decoder.named_modules() if is_cross_attention(path))
    idle = [child for part in crossing for name, child in part.named_children() if name in INPUT_SIDE]
    idle += [part for part in decoder.modules() if isinstance(part, nn.Embedding) and id(part.weight) not in heads]
    used, unused = executor.stored(nn.ModuleList([decoder, head])), executor.stored(nn.ModuleList(idle))
    return used.numbers - unused.numbers, used.read - unused.read
