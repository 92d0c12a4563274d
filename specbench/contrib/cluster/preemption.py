"""The signal by which Slurm warns a job of submitit's, of the time limit or of a preemption."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from specbench.errors import IncompleteError, first_line
from specbench.run.signals import handled, was_seen

WARNING = "SUBMITIT_PREEMPT_SIGNAL"  # of the environment: the name of submitit's signal, if not USR2


@contextmanager
def preemption_signal() -> Iterator[None]:
    """Inside of a job of submitit's, the signal raises KeyboardInterrupt too. Submitit's own handler, which may raise
    what decoding takes for an error of the device, is called when the run has ended: it queues the job again, and ends
    the process, or says why not. Raises IncompleteError with that. In other processes nothing changes."""
    number = getattr(signal, f"SIG{os.environ.get(WARNING, 'USR2')}", None)
    handler = number and signal.getsignal(number)
    if number is None or not callable(handler):
        yield
        return
    try:
        with handled(number):
            yield
    except KeyboardInterrupt:
        if not was_seen(number):
            raise
        try:
            handler(number, None)
        except Exception as error:
            raise IncompleteError(f"ended by its scheduler: {first_line(error)}") from error
        raise
