"""One lenience for the whole run (A.5): the setting `lenience`."""

from specbench.policies.lenience.base import LeniencePolicy


class FixedLenience(LeniencePolicy):
    """Uses the verifier of this lenience in every round."""
