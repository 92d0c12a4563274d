"""What an encoder reads: tokens, or features of what is no text, which stand where another encoder's tokens do."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any


class Features:
    """What an encoder reads of a sound. Its length is the number of positions that cross-attention reads, or that the
    sound would need if it is longer than the encoder reads."""

    def __init__(self, positions: int, make: Callable[[], Any]):
        """`make` computes the values [F, frames], a numpy array."""
        self.positions, self._make = positions, make

    def __len__(self) -> int:
        return self.positions

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: the length, since the sound may not be there."""
        return {"positions": self.positions, "_make": _not_here}

    @cached_property
    def values(self) -> Any:
        """[F, frames], computed when they are first asked for. Raises ConfigError."""
        return self._make()

    def forget(self) -> None:
        """Frees the values, which can be computed again."""
        vars(self).pop("values", None)


def _not_here() -> Any:
    raise RuntimeError("features of a sound are computed in the process that decodes it")


EncoderInput = Sequence[int] | Features  # tokens, or features
# Names that transformers gives to the attention to an encoder's outputs, whose keys and values have not the input of q.
CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "crossattention")


def is_cross_attention(path: str) -> bool:
    """Whether the module at a path attends to the outputs of an encoder."""
    return path.rpartition(".")[2] in CROSS_ATTENTION
