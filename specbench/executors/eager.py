"""The reference executor: runs every operation as it is written, one after the other."""

from specbench.decoding.executor import Executor


class EagerExecutor(Executor):
    """PyTorch's eager mode, as in the base class."""

    runs_divided = True
