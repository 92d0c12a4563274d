"""The workload in which every request is there from the start."""

from specbench.policies.workload.base import Workload


class AllAtOnce(Workload):
    """Requests are decoded as fast as rows become free."""
