"""The reference executor: everything runs as it is written, one operation after the other."""

from specbench.decoding.executor import Executor


class EagerExecutor(Executor):
    """PyTorch's eager mode, as the base class has it."""
