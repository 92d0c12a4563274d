"""What an encoder reads, and the names of the attention to its outputs."""

from collections.abc import Sequence

EncoderInput = Sequence[int]  # tokens
# Names that transformers gives to the attention to an encoder's outputs, whose keys and values have not the input of q.
CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "crossattention")


def is_cross_attention(path: str) -> bool:
    """Whether the module at a path attends to the outputs of an encoder."""
    return path.rpartition(".")[2] in CROSS_ATTENTION
