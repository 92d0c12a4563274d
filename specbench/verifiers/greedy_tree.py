"""Greedy verification of a tree: down along the target's argmaxes."""

from specbench.verifiers.match import MatchVerifier


class GreedyTreeVerifier(MatchVerifier):
    """At any node one child at most can be the argmax, so this finds the longest accepted path."""

    only_greedy = True
