"""Fixtures that several folders of the ring use."""

from audio_cases import here
from sweep_cases import apart, locks

__all__ = ["apart", "here", "locks"]
