"""Every request is there from the start."""

from dataclasses import dataclass

from specbench.context import Context


class AllAtOnce:
    """Requests are decoded as fast as rows are free."""

    @dataclass
    class Settings:
        pass

    rate: float | None = None

    def __init__(self, settings: Settings, context: Context | None):
        pass

    def arrivals(self, requests: int) -> list[float] | None:
        """None: there is nothing to wait for."""
        return None
