"""What a run is compared with. Our own plain decoding is always there; peers come on top of it."""

from dataclasses import dataclass

from specbench.context import Context
from specbench.decoding.queue import Job


@dataclass(frozen=True)
class PeerOutput:
    """One prompt, decoded by someone else's engine. The step that reads the prompt, and the tokens
    that come with it, are in neither number."""

    tokens: list[int]  # all new tokens
    decoded: int  # those after the first step
    decode_seconds: float


class AutoregressiveBaseline:
    """`baseline=autoregressive`: no peer."""

    names: tuple[str, ...] = ()
    loads_models = False  # whether it may need the weights a second time

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, context: Context):
        pass

    def decode(self, name: str, job: Job) -> PeerOutput:
        """Decodes one prompt with the peer of that name."""
        raise NotImplementedError(name)
