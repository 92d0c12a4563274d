"""Runs that share requests and plain decoding: each request is decoded in all ways before the next one begins."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from specbench.decoding import processes
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job
from specbench.decoding.verifier import Verifier
from specbench.errors import first_line
from specbench.peers.base import Peer, PeerOutput
from specbench.run.batching import Batch, Requests
from specbench.run.machine_watch import MachineWatch
from specbench.run.method_run import MethodRun
from specbench.run.phase_timer import Phases
from specbench.run.signals import allow_signals
from specbench.stats.records import Failure

PROBED, PROBED_LATER = 128, 32  # costs are probed on so many groups, and then on every 32nd
Way = tuple[Any, str]  # the member, or None for plain decoding, and the peer's name or ""
Tell = Callable[[str], None]  # what is going on


class InterleavedGroup:
    """Members whose settings differ in nothing that plain decoding's law depends on. One of them decodes plainly for
    all: one whose verifier adds nothing to a plain step (no renewal of noise, no lenience), if there is one."""

    def __init__(self, members: Sequence[MethodRun], watch: MachineWatch, phases: Phases, alone: bool = False):
        """`alone` says that these members are all that are decoded."""
        self.members, self.watch, self.phases = members, watch, phases
        self.alone = alone and len(members) == 1  # of several, some would be compiled and others not
        self.requests = Requests(members[0].parts, max(member.parts.spare for member in members))
        self.plain = min(members, key=lambda member: extra_work(member.parts.verifier))
        self.done = 0  # requests
        self.warm, self.inputs = 0, 0  # columns, and tokens of an encoder's input, that were warmed up

    def steps(self, tell: Tell) -> Iterator[int]:
        """Decodes one group after the other; yields its number of requests."""
        for number, wanted in enumerate(self.requests.groups()):
            self.step(wanted, number, tell)
            yield len(wanted.requests)

    def step(self, wanted: Batch, number: int, tell: Tell) -> None:
        """Decodes a group; `number` counts those that this process has decoded before."""
        with allow_signals():
            for member in self.members:
                member.session.costs.source = wanted.requests[0].prompt_id
            self.prepare(wanted, tell)
            probed = number < PROBED or number % PROBED_LATER == 0
            if probed:
                with self.phases("probes"):
                    self.watch()
        self._decode(wanted, number, probed)

    def prepare(self, wanted: Batch, tell: Tell) -> None:
        """Warms up for a group, if it needs more columns, or a longer input, than those before it."""
        longer = len(wanted.longest_input or ())
        if wanted.columns <= self.warm and longer <= self.inputs:
            return
        tell("warming up")
        for member in self.members:
            member.parts.target.executor.telling(tell)
            with self.phases("warm_up"):
                member.warm_up(wanted, not self.warm, self.requests.total if self.alone else 0)
        self.warm, self.inputs = max(self.warm, wanted.columns), max(self.inputs, longer)

    def _decode(self, wanted: Batch, number: int, probed: bool) -> None:
        """Decodes a group in all ways and gives each member its part; costs are probed on it if it is `probed`."""
        with allow_signals():
            jobs = self._jobs(wanted)
            decoded = self.decode_all_ways(wanted, jobs, number)
        try:
            with allow_signals():
                for member in self.members if probed else ():  # while its prompt is in the cache
                    with self.phases("probes"):
                        member.probe_costs(wanted)
        finally:  # also if the probes are interrupted: the group is decoded
            self._add(wanted, jobs, decoded)

    def _add(self, wanted: Batch, jobs: Sequence[Job], decoded: dict[Way, Any]) -> None:
        """Gives each member its part of a decoded group."""
        self.done += len(wanted.requests)
        plain = decoded[None, ""]
        groups = []
        for member in self.members:
            own = {name: decoded[member, name] for name in ("", *member.parts.peers)}
            failures = [found for found in (plain, *own.values()) if isinstance(found, Failure)]
            if failures:
                member.fail(failures[0])
                continue
            groups.append(member.add(wanted, jobs, own.pop(""), plain, own))
        for result in groups[0].results if groups else ():
            self.requests.remember(result)
        for group in groups:
            group.compact()

    def decode_all_ways(self, wanted: Batch, jobs: Sequence[Job], number: int) -> dict[Way, Any]:
        """What was decoded each way, in an order that turns with the number of the group."""
        ways: list[Way] = [(None, ""), *((member, "") for member in self.members)]
        ways += [(member, name) for member in self.members for name in member.parts.peers]
        return {way: self._one_way(way, wanted, jobs) for way in order_of_ways(ways, number)}

    def _jobs(self, wanted: Batch) -> list[Job]:
        seed, limit = self.members[0].parts.seed, self.requests.limit
        return [Job(r.tokens, limit(r), prompt_key(seed, r.id), r.encoder_input) for r in wanted.requests]

    def _one_way(self, way: Way, wanted: Batch, jobs: Sequence[Job]) -> Any:
        """What was decoded one way. An error of the device, as when memory runs out, is a failure of these requests,
        and the run goes on without them."""
        member, peer = way
        try:
            with self.phases("peers" if peer else "speculative" if member else "plain"):
                if peer:
                    return self._by_peer(member.parts.peers[peer], jobs, member.parts.batch_size)
                betas = any(m.reads_texts for m in ([member] if member else self.members))
                return (member or self.plain).decode(jobs, wanted, member is not None, betas)
        except RuntimeError as error:
            processes.current.fail_if_distributed(error)
            return Failure(wanted.requests, f"{type(error).__name__}: {first_line(error)}")

    def _by_peer(self, peer: Peer, jobs: Sequence[Job], rows: int) -> list[PeerOutput]:
        """The work of a server on this machine is not that of others."""
        with self.watch.elsewhere() if peer.elsewhere else nullcontext():
            return peer.decode_all(jobs, rows)


def order_of_ways(ways: Sequence[Way], number: int) -> list[Way]:
    """The order of the ways for one group: two take turns, more are shuffled by the group's number, so that none is
    always first, or always behind the same other one."""
    if len(ways) == 2:
        return [*ways[number % 2 :], *ways[: number % 2]]
    return [ways[place] for place in np.random.default_rng(number).permutation(len(ways))]


def extra_work(verifier: Verifier) -> tuple[bool, ...]:
    """What a verifier does in a plain step that others do not."""
    return verifier.looks_ahead, len(verifier.levels) > 1, verifier.lenience < 1
