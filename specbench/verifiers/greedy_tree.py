"""Greedy verification of a tree (SpecInfer): accepts the guesses that are the target's argmaxes."""

from specbench.verifiers.match import MatchVerifier


class GreedyTreeVerifier(MatchVerifier):
    """Only for temperature 0. At most one child of a node is the argmax, so this finds the longest accepted path."""

    only_greedy = True
