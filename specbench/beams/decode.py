"""Decodes requests by beam search, one after the other, plainly or speculatively, and times them."""

from collections import abc
from collections.abc import Mapping
from typing import Any

from specbench.beams.reader import TreeReader
from specbench.beams.rounds import BeamRound, plain_round, speculative_round
from specbench.beams.search import BeamRules, FoundBeams, Search
from specbench.decoding.sequence import Sequence
from specbench.decoding.timer import DECODING, Stage, Timer
from specbench.measure.record import Rounds, Text
from specbench.models.language_model import LanguageModel

Seconds = Mapping[Stage, float]  # by stage of a round


def decode_beams(
    target: LanguageModel,
    drafter: LanguageModel | None,
    rules: BeamRules,
    jobs: abc.Sequence[Sequence],
    columns: int,
    gamma: int,
) -> tuple[list[Text], list[FoundBeams]]:
    """Decodes jobs through one row of `columns` columns, with gamma levels of guesses of a drafter, or plainly (None).
    Returns the best text of each, and all beams."""
    clock = Timer(target.device)
    found = [_search(target, drafter, rules, job, columns, gamma, clock) for job in jobs]
    stages = clock.rounds()
    prefill, of_drafter = (
        sum(own.get(stage, 0.0) for own in stages) / len(jobs) for stage in (Stage.PREFILL, Stage.DRAFTER_PREFILL)
    )
    calls = [own for own in stages if Stage.VERIFY in own]
    texts, begin = [], 0
    for rounds, beams in found:
        ids = list(beams.hypotheses[0].tokens)
        own = recorded(rounds, calls[begin : begin + len(rounds)], len(ids))
        begin += len(rounds)
        seconds = sum(map(sum, (own.draft, own.verify, own.accept, own.host)))
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        texts.append(Text(ids, text, seconds, prefill, of_drafter, record_seconds=0.0, rounds=own))
    return texts, [beams for _, beams in found]


def _search(
    model: LanguageModel, drafting: LanguageModel | None, rules: BeamRules, job: Sequence, columns: int, gamma: int,
    clock: Timer,
) -> tuple[list[BeamRound], FoundBeams]:  # fmt: skip
    """The rounds of one request, and what they found."""
    prompt, stops = list(job.tokens), frozenset(model.stop_tokens)
    search = Search(rules, prompt[-1], stops, job.limit - len(prompt), model.device, model.forced_tokens)
    clock.start()
    target = TreeReader(model, prompt, columns, job.encoder_input)
    clock.end(Stage.PREFILL)
    drafter, room = None, 0
    if drafting is not None:
        drafter = TreeReader(drafting, prompt, columns, job.encoder_input)
        room = drafting.context - len(prompt) - 1
        clock.end(Stage.DRAFTER_PREFILL)
    rounds: list[BeamRound] = []
    while not search.over:
        if rounds:
            clock.start()
        levels = max(0, min(gamma, search.limit - search.levels - 1, room - search.levels))
        clock.end(Stage.HOST)
        if drafter is None:
            rounds.append(plain_round(search, target, clock))
        else:
            rounds.append(speculative_round(search, target, drafter, levels, clock))
    read = 0 if drafter is None else drafter.tokens
    return rounds, FoundBeams(tuple(search.finished), search.levels, len(rounds), target.tokens, read)


def recorded(rounds: abc.Sequence[BeamRound], calls: abc.Sequence[Seconds], end: int) -> Rounds:
    """The rounds that yielded tokens of a best text of `end` tokens, with the seconds of their calls. Levels behind its
    end are not counted, as tokens behind a stop are not; the time of calls behind it is split evenly among the others.
    """
    found, position = Rounds(), 0
    for made in rounds:
        if position >= end:
            break
        tokens = min(made.levels, end - position)
        accepted = min(made.accepted, tokens)
        rejected = made.rejected and tokens == made.levels
        values: dict[str, Any] = {
            "gamma": made.gamma,
            "drafted": made.gamma,
            "tested": accepted + rejected,
            "accepted": accepted,
            "tokens": tokens,
            "recovered": int(rejected),
            "bonus": int(tokens == made.levels > made.accepted == made.gamma),
            "steps": made.gamma,
            "rows": 1,
            "width": made.width,
            "lenience": 1.0,
            "betas": [1.0] * accepted + [0.0] * rejected,
        }
        found.add(**values | dict.fromkeys(("draft", "verify", "accept", "host"), 0.0))
        position += made.levels
    count = len(found)
    for stage in DECODING:
        own = [call.get(stage, 0.0) for call in calls]
        behind = sum(own[count:]) / count
        setattr(found, stage.value, [seconds + behind for seconds in own[:count]])
    return found
