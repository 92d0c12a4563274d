"""A request and its text, as the decoders hold it beside the tensors of a state."""

from collections import abc
from dataclasses import dataclass, field, replace

EncoderInput = abc.Sequence[int]  # tokens that an encoder reads


@dataclass(eq=False)
class Sequence:
    """A request: its prompt, and what was decoded behind it."""

    tokens: list[int]  # the prompt in the decoder's text, then what was generated
    limit: int  # the length in tokens, prompt included, at which it ends
    key: int  # of its noise
    encoder_input: EncoderInput | None = None  # tokens that an encoder reads, if there is one
    request_id: int = 0  # its place among the requests that are decoded together
    prompt_length: int = 0  # tokens
    active: bool = False  # its prompt has been read, and its text has not ended
    # Seconds since decoding began, by a clock that stands still while rounds are recorded: "arrived", "admitted" (got a
    # row), "first_token", "finished". Empty if all requests are there at once.
    times: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_length = self.prompt_length or len(self.tokens)

    @property
    def generated(self) -> list[int]:
        """The tokens that were decoded."""
        return self.tokens[self.prompt_length :]

    def fresh(self, request_id: int) -> "Sequence":
        """The same request before anything was decoded, under another number."""
        prompt = self.tokens[: self.prompt_length]
        return replace(self, tokens=prompt, request_id=request_id, active=False, times={})
