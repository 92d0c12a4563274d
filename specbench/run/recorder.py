"""Records each round as raw numbers, one record per round and row, computed outside the timed laps."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.model import Scores
from specbench.decoding.state import State
from specbench.decoding.timer import Laps
from specbench.stats.estimates import Floats
from specbench.stats.metrics.base import Metric, Path
from specbench.stats.records import Round
from specbench.stats.verdict_records import LAW_BYTES, DrawnFrom, evidence_numbers, width
from specbench.verifiers.base import Verifier

Beta = Callable[[Tensor, Draft, Verdict], Tensor]  # `Verifier.beta`
ActiveRow = tuple[
    int, int, int, Floats
]  # its number, that of its request, its new tokens before the round, numbers [K]


class RoundCounts(NamedTuple):
    """The first numbers of a round and row; those of the metrics follow, then the betas."""

    kept: int  # tokens that the row kept
    accepted: int  # guesses, by the verifier
    gamma: int  # depth of the draft
    tested: int  # steps that were tested, none beyond a stop
    judged: int  # steps that had a guess
    next_guess: int  # the guess after the accepted ones


class Call(NamedTuple):
    """The numbers of one round for all rows."""

    owners: list[int]  # by row, the number of its request
    lenience: float
    width: int  # tokens of each row that the target's call read
    numbers: Tensor  # [B, K]: counts, metrics, betas, evidence
    steps: int  # D
    drawn: int  # drafter steps
    law: Tensor | None  # [B, D + 1, V], the decoder's p along the path (`_laws`), while there is room for it
    drafts: Tensor | None  # [B, D, V], the drafter's q of the same call, if it has one and the verdict needs it


class Recorder:
    """The round hook that measures. `reduce` is `round_numbers`, or an executor's version of it. For the losslessness
    test it records `evidence`. With either this or `laws` it keeps p, as far as there is room."""

    def __init__(
        self,
        verifier: Verifier,
        metrics: Mapping[str, Metric],
        reduce: Callable[..., Tensor] | None = None,
        evidence: bool = False,
        laws: bool = False,
    ):
        self.verifier, self.metrics, self.reduce = verifier, metrics, reduce or round_numbers
        self._evidence, self._room = evidence, LAW_BYTES if evidence or laws else 0.0
        self._calls: list[Call] = []

    def __call__(self, state: State, scores: Scores, draft: Draft, verdict: Verdict, kept: Tensor) -> None:
        """Stores the numbers [B, K] of a round; kept [B] is the number of tokens that each row kept."""
        judge, metrics = self.verifier.under(state), tuple(self.metrics.values())
        numbers = self.reduce(scores.p, draft, verdict, kept, judge.beta, metrics, self._evidence)
        laws = self._laws(scores, draft, verdict, kept)
        # A CUDA graph overwrites its outputs in the next round.
        call = Call(state.request_ids, judge.lenience, scores.width, numbers.clone(), draft.depth, state.drawn, *laws)
        self._calls.append(call)

    def _laws(
        self, scores: Scores, draft: Draft, verdict: Verdict, kept: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Copies of p along the path [B, D + 1, V], at temperature 0 before the argmax, and of q; None if there is no
        room left for them."""
        if self._room <= 0:
            return None, None
        path = chosen_path(scores.p if scores.logits is None else scores.logits, draft, verdict, kept)
        law = path.p.clone() if scores.logits is None else path.p.softmax(-1)
        q = path.draft.probs if self._evidence else None
        q = None if q is None else q.clone()
        self._room -= law.nbytes + (0 if q is None else q.nbytes)
        return (law, q) if self._room >= 0 else (None, None)

    def rounds(self, laps: Sequence[Laps]) -> list[list[Round]]:
        """A record of each row that was active, by round; `laps` are the seconds of each. Where no row was, the round
        was launched before the host knew that all texts had ended, and has no number."""
        found: list[list[Round]] = []
        served = 0
        for (call, rows), seconds in zip(self._rows(), laps, strict=True):
            shared: dict[str, Any] = {"seconds": seconds, "rows": len(rows), "steps": call.drawn, "width": call.width}
            shared |= {"lenience": call.lenience, "call": served}
            found.append([self._round(owner, at, numbers.tolist(), shared) for _, owner, at, numbers in rows])
            served += bool(rows)
        return found

    def evidence(self, requests: int) -> list[DrawnFrom]:
        """What stood behind the tokens of each of so many requests."""
        found = [DrawnFrom(self.verifier.keeps_guess) for _ in range(requests)]
        for call, rows in self._rows():
            for row, owner, position, numbers in rows:
                counts = RoundCounts(*map(int, numbers[: len(RoundCounts._fields)]))
                if self._evidence:
                    found[owner].add(position, counts.kept, counts.tested, numbers[-width(call.steps) :])
                if call.law is not None:
                    found[owner].laws.append((position, call.law[row, : counts.kept]))
                if call.drafts is not None:
                    found[owner].drafts.append((position, call.drafts[row, : counts.tested]))
        return found

    def _rows(self) -> Iterator[tuple[Call, list[ActiveRow]]]:
        """Each round with the rows that kept tokens. The lengths that the host knew during a round may be late, so they
        are counted here."""
        lengths = Counter[int]()  # by request, the tokens that it has
        rounds = [call.numbers for call in self._calls]
        whole = torch.cat([numbers.flatten() for numbers in rounds]).cpu() if rounds else torch.empty(0)  # in one wait
        for call, own in zip(self._calls, whole.split([*map(Tensor.numel, rounds)]), strict=True):
            active = []
            table = own.view(call.numbers.shape).numpy()
            for row, (owner, numbers) in enumerate(zip(call.owners, table, strict=True)):
                if (kept := int(numbers[0])) > 0:
                    active.append((row, owner, lengths[owner], numbers))
                    lengths[owner] += kept
            yield call, active

    def _round(self, owner: int, position: int, numbers: list[float], shared: dict[str, Any]) -> Round:
        rest = len(RoundCounts._fields)
        counts, found = RoundCounts(*map(int, numbers[:rest])), {}
        for name, metric in self.metrics.items():
            found[name] = tuple(numbers[rest : rest + len(metric.columns)])
            rest += len(metric.columns)
        own_token = counts.kept == counts.accepted + 1
        rejected = counts.accepted < counts.judged
        return Round(
            row=owner,
            position=position,
            gamma=counts.gamma,
            accepted=min(counts.accepted, counts.kept),
            tested=counts.tested,
            tokens=counts.kept,
            recovered=int(own_token and rejected),
            bonus=int(own_token and counts.accepted == counts.judged),
            accepted_before_stop=counts.accepted,
            beta=numbers[rest : rest + counts.tested],
            rejected=counts.next_guess if rejected else None,
            numbers=found,
            **shared,
        )


def round_numbers(
    p: Tensor,
    draft: Draft,
    verdict: Verdict,
    kept: Tensor,
    beta_of: Beta,
    metrics: tuple[Metric, ...],
    evidence: bool = False,
) -> Tensor:
    """A round as float64 numbers per row, [B, K]: `RoundCounts`, metrics, beta of every step, and with `evidence` those
    of `evidence_numbers`. p [B, N + 1, V], kept [B]."""
    beta, gamma = beta_of(p, draft, verdict).double(), draft.steps()
    path = chosen_path(p, draft, verdict, kept)
    judged, D = path.draft.count, path.draft.tokens.shape[1]
    next_guess = torch.zeros_like(kept)
    if D:
        next_guess = path.draft.tokens.gather(1, verdict.accepted.clamp(max=D - 1)[:, None])[:, 0]
    counts = torch.stack([kept, verdict.accepted, gamma, path.tested, judged, next_guess], 1).double()
    more = [evidence_numbers(path)] if evidence else []
    return torch.cat([counts, *(metric_numbers(metric, path) for metric in metrics), beta, *more], 1)


def metric_numbers(metric: Metric, path: Path) -> Tensor:
    """The numbers [B, K] of a metric. Raises ValueError if they are not as many as its columns."""
    numbers, columns = metric.of_round(path), metric.columns
    if numbers.shape != (len(path.kept), len(columns)):
        raise ValueError(
            f"{type(metric).__name__}.of_round returned a tensor of shape {tuple(numbers.shape)} where its columns "
            f"{', '.join(columns)} need {(len(path.kept), len(columns))}"
        )
    return numbers


def chosen_path(p: Tensor, draft: Draft, verdict: Verdict, kept: Tensor) -> Path:
    """p along the path that was taken, and the first guess of each step as a chain. p [B, N + 1, V], kept [B]."""
    if verdict.path is not None and not draft.is_chain:
        from specbench.decoding.verify_tree import accepted_path

        entries, first, judged = accepted_path(draft, verdict)
        rows = torch.arange(len(entries), device=p.device)[:, None]
        q = None if draft.probs is None else draft.probs[rows, first]
        p, draft = p[rows, entries], Draft.chain(draft.tokens.gather(1, first), q, judged)
    tested = torch.minimum(torch.minimum(verdict.accepted + 1, draft.count), kept)
    return Path(p, draft, verdict.tokens, verdict.accepted, kept, tested)
