"""Decodes requests by beam search, one after the other, plainly or speculatively, and times them."""

from collections import abc

from specbench.config.components import Components
from specbench.contrib.beams.beam_search import BeamRound, plain_round, speculative_round
from specbench.contrib.beams.search_state import BeamRules, FoundBeams, Search
from specbench.contrib.beams.tree_reader import TreeReader
from specbench.decoding.protocols import GammaPolicy
from specbench.decoding.sequence import Sequence
from specbench.decoding.timer import READING, Lap, Laps, Timer
from specbench.models.language_model import LanguageModel
from specbench.stats.records import DecodedRequest, DecodeResult, Round
from specbench.stats.reference_distribution import ROUNDINGS


def decode_beams(
    parts: Components, rules: BeamRules, jobs: abc.Sequence[Sequence], columns: int, policy: GammaPolicy | None
) -> DecodeResult:
    """Decodes `jobs` through one row of `columns` columns, speculatively with the gamma of a policy, or plainly."""
    clock = Timer(parts.target.device)
    found = [_search(parts, rules, job, columns, policy, clock) for job in jobs]
    laps = [lap for lap in clock.rounds() if Lap.VERIFY in lap]
    requests: list[DecodedRequest] = []
    begin = 0
    for row, (rounds, beams) in enumerate(found):
        tokens = list(beams.hypotheses[0].tokens)
        own = counted_rounds(rounds, laps[begin : begin + len(rounds)], row, begin, len(tokens))
        begin += len(rounds)
        requests.append(DecodedRequest(tokens, own, search=beams))
    models = [parts.target, *parts.drafter.models] if policy else [parts.target]
    return DecodeResult(
        requests=requests,
        calls=sum(len(request.rounds) for request in requests),
        laps={lap: sum(each.get(lap, 0.0) for each in laps) for lap in Lap},
        prefill_seconds=sum(lap.get(name, 0.0) for lap in laps for name in READING),
        drafter_prefill_seconds=sum(lap.get(Lap.DRAFTER_PREFILL, 0.0) for lap in laps),
        kv_bytes=sum(model.cache_bytes() for model in models),
    )


def _search(
    parts: Components, rules: BeamRules, job: Sequence, columns: int, policy: GammaPolicy | None, clock: Timer
) -> tuple[list[BeamRound], FoundBeams]:
    """The rounds of one request, and what they found."""
    prompt, model = list(job.tokens), parts.target
    stops, new = frozenset(model.stop_tokens), job.limit - len(prompt)
    search = Search(rules, prompt[-1], stops, new, model.device, model.forced_tokens)
    clock.start()
    target = _opened(model, job, columns)
    clock.lap(Lap.PREFILL)
    drafter, room = None, 0
    rounds: list[BeamRound] = []
    if policy is not None and isinstance(own := parts.drafter.models[0], LanguageModel):
        drafter, room = _opened(own, job, columns), own.context - len(prompt) - 1
        clock.lap(Lap.DRAFTER_PREFILL)
    while not search.over:
        if rounds:
            clock.start()
        most = 0 if policy is None else policy.largest
        gamma = max(0, min(most, search.limit - search.levels - 1, room - search.levels))
        clock.lap(Lap.HOST)
        if drafter is None:
            rounds.append(plain_round(search, target, clock))
        else:
            rounds.append(speculative_round(search, target, drafter, gamma, clock))
    read = 0 if drafter is None else drafter.tokens
    tokens, coarse = (target.tokens, read), model.dtype in ROUNDINGS
    return rounds, FoundBeams(tuple(search.finished), search.levels, len(rounds), *tokens, coarse)


def _opened(model: LanguageModel, job: Sequence, columns: int) -> TreeReader:
    reader = TreeReader(model)
    reader.open(job.tokens, columns, job.encoder_input)
    return reader


def counted_rounds(
    rounds: abc.Sequence[BeamRound], laps: abc.Sequence[Laps], row: int, call: int, end: int
) -> list[Round]:
    """The rounds of a request that yielded tokens of its best text, `end` tokens long, with their laps; `call` is
    the number of the first call. The search may go on behind the end of that text: such calls are not counted, and
    their time is split evenly among the others."""
    own: list[Round] = []
    position = 0
    for number, (made, seconds) in enumerate(zip(rounds, laps, strict=True), call):
        if position >= end:
            break
        own.append(recorded(made, row, number, position, end))
        own[-1].seconds = dict(seconds)
        position += made.levels
    behind = laps[len(own) :]
    for lap in dict.fromkeys(lap for seconds in behind for lap in seconds):
        share = sum(seconds.get(lap, 0.0) for seconds in behind) / len(own)
        for made_here in own:
            made_here.seconds = {**made_here.seconds, lap: made_here.seconds.get(lap, 0.0) + share}
    return own


def recorded(made: BeamRound, row: int, call: int, position: int, end: int) -> Round:
    """A round that began with `position` levels, of a text of `end` tokens: levels behind its end are not counted, as
    tokens behind a stop are not."""
    tokens = max(0, min(made.levels, end - position))
    accepted = min(made.accepted, tokens)
    rejected = made.rejected and tokens == made.levels
    return Round(
        row=row,
        position=position,
        gamma=made.gamma,
        accepted=accepted,
        tested=accepted + rejected,
        tokens=tokens,
        recovered=int(rejected),
        bonus=int(tokens == made.levels > made.accepted == made.gamma),
        accepted_before_stop=made.accepted,
        beta=[1.0] * accepted + [0.0] * rejected,
        steps=made.gamma,
        width=made.width,
        call=call,
    )
