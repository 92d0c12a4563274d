"""The requests of a run, turn by turn, in the groups that are decoded together."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

from specbench.config.build import Parts
from specbench.data.prompts import Prompt, Request, render
from specbench.decoding.sequence import EncoderInput
from specbench.errors import ConfigError

log = logging.getLogger(__name__)
FEWEST, MOST = 4, 16  # requests per row in a group: rows idle at the end of each, and a failure loses all of it
GROUPS = 8  # of a turn, if there are enough requests: so often the methods take turns


@dataclass(frozen=True)
class Batch:
    """A group of requests that are decoded together, and what the longest request of its turn needs."""

    number: int  # of the group, in the run
    requests: Sequence[Request]
    columns: int  # of the cache
    arrivals: list[float] | None = None  # second of each, if they arrive over time
    longest_input: EncoderInput | None = None  # of an encoder


class Requests:
    """The prompts of a run as requests. Plain decoding's answers of a turn are the next one's history, for all."""

    def __init__(self, parts: Parts, spare: int):
        """`spare` cache columns take the guesses beyond a row's limit."""
        self.parts, self.spare = parts, spare
        self.answers: dict[str, list[str]] = {prompt.id: [] for prompt in parts.prompts}
        self.total = sum(len(prompt.turns) for prompt in parts.prompts)
        self._numbers = count()  # of groups
        self.notes: list[str] = []
        self.too_long: list[int] = []  # tokens of each turn that does not fit, and of those that would follow it

    def batches(self) -> Iterator[Batch]:
        """Groups of all first turns, then of second turns, ... Raises ConfigError if none fits, or one is empty."""
        for turn in range(max(len(prompt.turns) for prompt in self.parts.prompts)):
            yield from self._of_turn(turn)

    def _of_turn(self, turn: int) -> Iterator[Batch]:
        """The groups of a turn; all answers of the turns before it are known."""
        parts, before = self.parts, len(self.too_long)
        waiting = [request for prompt in parts.prompts if (request := self._request(prompt, turn)) is not None]
        if len(self.too_long) > before:
            self._warn(turn, len(self.too_long) - before, bool(waiting))
        longest = max((len(request.tokens) for request in waiting), default=0)
        columns = min(longest + parts.root.max_new_tokens, parts.target.context) + self.spare
        inputs = [request.encoder_input for request in waiting if request.encoder_input is not None]
        cuts = groups_of(len(waiting), parts.root.batch_size, parts.workload.over_time)
        for begin, end in pairwise(cuts):
            number = next(self._numbers)
            arrivals = parts.workload.arrivals(end - begin, number)
            yield Batch(number, waiting[begin:end], columns, arrivals, max(inputs, key=len, default=None))

    def _request(self, prompt: Prompt, turn: int) -> Request | None:
        """A turn of a prompt; None if there is none, it does not fit, or an answer is missing. Raises ConfigError."""
        parts, target = self.parts, self.parts.target
        answers = self.answers[prompt.id]
        if len(prompt.turns) <= turn or len(answers) != turn:
            return None
        request = parts.rendered.get(prompt) or render(prompt, answers, target.tokenizer, target.chat_template)
        if target.start_tokens is not None:  # an encoder reads the prompt
            request = replace(request, tokens=list(target.start_tokens), encoder_input=request.tokens)
        if not request.prompt_tokens:
            raise ConfigError(f"prompt {request.id} is empty, and the tokenizer of {target.name} has no BOS token")
        if request.prompt_tokens <= parts.longest_prompt:
            return request
        self.too_long += [request.prompt_tokens] * (len(prompt.turns) - turn)
        return None

    def _warn(self, turn: int, count: int, some_left: bool) -> None:
        """Warns of requests that are left out from this turn on. Raises ConfigError if none is left of the first."""
        most = self.parts.longest_prompt
        if turn == 0 and not some_left:
            why = "".join(f", since {limit}" for limit in self.parts.target.limits)
            raise ConfigError(
                f"no prompt fits: the shortest has {min(self.too_long)} tokens, and {self.parts.target.name} reads at "
                f"most {most} tokens{why}: give shorter ones (data=jsonl data.path=F)"
            )
        longest = max(self.too_long)
        self.notes.append(f"{count} requests of more than {most} tokens are left out, the longest has {longest}")
        log.warning("%s", self.notes[-1])


def groups_of(requests: int, rows: int, over_time: bool) -> list[int]:
    """Where the groups of so many requests that go through `rows` rows begin, and the end of the last one. They are as
    equal as can be, since the rows of a small one are idle for most of it."""
    few = 3 if requests >= 6 * rows else 1  # three have an interval
    groups = max(min(GROUPS, requests // (FEWEST * rows)), min(few, requests))
    if not over_time:
        groups = requests if rows == 1 else max(groups, -(-requests // (MOST * rows)))
    return [number * requests // groups for number in range(groups + 1)] if groups else []
