"""A worker, as the process that gives out the groups sees it."""

from dataclasses import dataclass
from typing import Any

from specbench.contrib.ray.worker import Place


@dataclass
class WorkerHandle:
    """A worker, and what it does."""

    number: int  # from 1 on; one that takes the place of a dead one has a new number
    worker: Any
    doing: str = ""  # the method that was called
    call: Any = None
    group: int = -1  # that it decodes
    host: str = ""
    place: Place | None = None
    turn: int = -1  # the last one that it has opened
    opening: int = -1  # the one that it opens
    begun: float = 0.0  # when it was ready
    lost: bool = False
