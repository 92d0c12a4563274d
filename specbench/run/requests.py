"""Forms the groups of requests that are decoded together, turn by turn."""

from collections.abc import Iterator
from dataclasses import dataclass

from specbench.data.prompts import Request, render
from specbench.decoded import Result
from specbench.run.parts import Parts
from specbench.settings import ConfigError

ROUNDS_OF_REQUESTS = 4  # requests per row in a group, which is decoded one way and then the other


@dataclass(frozen=True)
class Wanted:
    """A group of requests to decode, and the cache columns that the longest request of its turn needs."""

    requests: list[Request]
    columns: int


class Requests:
    """The prompts of a run as requests. The answers of a turn become the history of the next one."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.answers: dict[str, list[str]] = {prompt.id: [] for prompt in parts.prompts}
        self.too_long: list[Request] = []

    @property
    def total(self) -> int:
        """The number of turns of all prompts."""
        return sum(len(prompt.turns) for prompt in self.parts.prompts)

    def limit(self, request: Request) -> int:
        """The length in tokens, prompt included, at which a request ends."""
        return min(len(request.tokens) + self.parts.max_new_tokens, self.parts.target.context)

    def remember(self, result: Result) -> None:
        """Keeps the baseline's answer as the history of the next turn, for both decoders."""
        text = self.parts.target.tokenizer.decode(result.baseline.tokens, skip_special_tokens=True)
        self.answers[result.request.prompt_id].append(text)

    def groups(self) -> Iterator[Wanted]:
        """Groups of all first turns, then of the second turns, and so on. Raises ConfigError if no prompt fits the
        context, or if one is empty."""
        parts = self.parts
        size = parts.batch_size * (1 if parts.batch_size == 1 else ROUNDS_OF_REQUESTS)
        size = len(parts.prompts) if parts.workload.over_time else size
        for turn in range(max(len(prompt.turns) for prompt in parts.prompts)):
            waiting = self._turn(turn)
            if turn == 0 and not waiting:
                shortest = min(len(request.tokens) for request in self.too_long)
                raise ConfigError(
                    f"no prompt fits: the shortest has {shortest} tokens, "
                    f"and the context of {parts.target.name} must hold at least one more, {parts.target.context}"
                )
            columns = max((self.limit(request) for request in waiting), default=0) + parts.spare
            for begin in range(0, len(waiting), size):
                yield Wanted(waiting[begin : begin + size], columns)

    def _turn(self, turn: int) -> list[Request]:
        """The requests of one turn that fit the context. Raises ConfigError if one is empty."""
        target, waiting = self.parts.target, []
        for prompt in self.parts.prompts:
            if len(prompt.turns) <= turn or len(self.answers[prompt.id]) != turn:
                continue
            request = render(prompt, self.answers[prompt.id], target.tokenizer, target.chat_template)
            if not request.tokens:
                raise ConfigError(f"prompt {request.id} is empty, and the tokenizer of {target.name} has no BOS token")
            if len(request.tokens) < target.context:
                waiting.append(request)
            else:  # the turns after it cannot be asked either
                self.too_long += [request] * (len(prompt.turns) - turn)
        return waiting
