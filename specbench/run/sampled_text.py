"""One text per request, sampled from the standardized distribution (section 2.2)."""

from specbench.decoding.search import Decoding


class SamplingDecoding(Decoding):
    """Algorithm 1; plain decoding draws one token per target call."""
