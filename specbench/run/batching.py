"""Forms the groups of requests that are decoded together, turn by turn."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from specbench.config.components import FEWEST, MOST, Components, segment_size
from specbench.data.prompts import Prompt, Request, render
from specbench.decoding.encoder_input import EncoderInput
from specbench.errors import ConfigError
from specbench.policies.workload import Workload
from specbench.stats.records import Result

log = logging.getLogger(__name__)
GROUPS = 8  # of a turn, if there are enough requests: so often both ways of decoding take turns


@dataclass(frozen=True)
class Batch:
    """A group of requests to decode, and what the longest request of its turn needs."""

    number: int  # of the group, in the run
    requests: Sequence[Request]
    columns: int  # of the cache
    arrivals: list[float] | None = None  # second of each, if they arrive over time
    rate: float | None = None  # requests per second, if the workload has rates
    longest_input: EncoderInput | None = None  # of an encoder


class Requests:
    """The prompts of a run as requests. The answers of a turn become the history of the next one."""

    def __init__(self, parts: Components, spare: int | None = None):
        """`spare` cache columns take the guesses beyond a row's limit: those of the run unless given."""
        self.parts, self.spare = parts, parts.spare if spare is None else spare
        self.told: set[str] = set()  # warnings that were given; other ways may share it
        self.answers: dict[str, list[str]] = {prompt.id: [] for prompt in parts.prompts}
        self.total = sum(len(prompt.turns) for prompt in parts.prompts)
        self.turns = max(len(prompt.turns) for prompt in parts.prompts)
        self.too_long: list[int] = []  # tokens of each turn that does not fit, and of those that would follow it

    def remember(self, result: Result) -> None:
        """Keeps the baseline's answer as the history of the next turn, for both decoders."""
        answer = self.parts.target.tokenizer.decode(result.baseline.tokens, skip_special_tokens=True)
        self.answers[result.request.prompt_id].append(answer)

    def groups(self) -> Iterator[Batch]:
        """Groups of all first turns, then of the second turns, and so on. Raises ConfigError if no prompt fits the
        context, or if one is empty."""
        first = 0
        for turn in range(self.turns):
            batches = self.open(turn, first)
            yield from batches
            first += len(batches)

    def open(self, turn: int, first: int) -> list[Batch]:
        """The groups of a turn, numbered from `first` on; all answers of the turns before it are known. Raises
        ConfigError as `groups`."""
        parts, before = self.parts, len(self.too_long)
        waiting = self._turn(turn)
        if left_out := len(self.too_long) - before:
            if turn == 0 and not waiting:
                raise ConfigError(
                    f"no prompt fits: the shortest has {min(self.too_long)} tokens, "
                    f"and {parts.target.name} reads at most {parts.longest_prompt} tokens: give shorter "
                    "ones (data=jsonl data.path=F), or data=unconditional"
                )
            self._warn(turn, left_out, {request.category for request in waiting})
        longest = max((len(request.tokens) for request in waiting), default=0)
        columns = min(longest + parts.max_new_tokens, parts.target.context) + self.spare
        inputs = [request.encoder_input for request in waiting if request.encoder_input is not None]
        longest_input, workload = max(inputs, key=len, default=None), parts.workload
        batches = []
        for number, (begin, end) in enumerate(pairwise(self._cuts(len(waiting))), first):
            arrivals, rate = workload.arrivals(end - begin, parts.segments_before + number), workload.rate
            batches.append(Batch(number, waiting[begin:end], columns, arrivals, rate, longest_input))
        return batches

    def _warn(self, turn: int, count: int, left: set[str]) -> None:
        """Warns of requests that are left out from this turn on; `left` are the categories of those that are not."""
        text = f"{count} request{'s do' if count > 1 else ' does'} not fit the "
        text += f"{self.parts.longest_prompt} tokens that can be read"
        text += f", or would follow one that does not, from turn {turn + 1} on" if self.turns > 1 else ""
        text += f", and {'are' if count > 1 else 'is'} left out: the longest has {max(self.too_long)} tokens"
        lost = dict.fromkeys(p.category for p in self.parts.prompts if p.category not in left) if turn == 0 else {}
        text += f"; none is left of {', '.join(lost)}" if any(lost) else ""
        if text not in self.told:
            log.warning("%s", text)
        self.told.add(text)

    def _cuts(self, requests: int) -> list[int]:
        """Where the groups of a turn begin, and the end of the last one."""
        rows, workload = self.parts.batch_size, self.parts.workload
        if not workload.over_time:
            return [*range(0, requests, group_size(requests, rows)), requests]
        count = segments(requests, rows, workload)
        return [number * requests // count for number in range(count + 1)] if count else []

    def _turn(self, turn: int) -> list[Request]:
        """The next turns of prompts that fit the context. Raises ConfigError if one is empty."""
        target, waiting = self.parts.target, []
        for prompt in self.parts.prompts:
            if len(prompt.turns) <= turn or len(self.answers[prompt.id]) != turn:
                continue
            request = self._request(prompt)
            tokens = request.prompt_tokens
            if not tokens:
                raise ConfigError(f"prompt {request.id} is empty, and the tokenizer of {target.name} has no BOS token")
            if tokens <= self.parts.longest_prompt:
                waiting.append(request)
            else:  # the turns after it cannot be asked either
                self.too_long += [tokens] * (len(prompt.turns) - turn)
        return waiting

    def _request(self, prompt: Prompt) -> Request:
        """The next turn of a prompt."""
        target = self.parts.target
        answers, start = self.answers[prompt.id], target.start_tokens
        if prompt not in self.parts.rendered:
            return render(prompt, answers, target.tokenizer, target.chat_template, start)
        known = self.parts.rendered[prompt]
        return known if start is None else replace(known, tokens=list(start), encoder_input=known.tokens)


def group_size(requests: int, rows: int) -> int:
    """The number of requests in each group but the last, of so many that go through `rows` rows. Groups are as equal as
    can be, since the rows of a small one are idle for most of it."""
    if rows == 1:
        return 1
    groups = max(min(GROUPS, requests // (FEWEST * rows)), -(-requests // (MOST * rows)), 1)
    return max(1, -(-requests // groups))


def segments(requests: int, rows: int, workload: Workload) -> int:
    """The number of segments of so many requests, at most GROUPS."""
    return max(min(GROUPS, requests // segment_size(rows, workload)), min(1, requests))
