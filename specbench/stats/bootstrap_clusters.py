"""Clusters of requests: those whose numbers may have something in common beside the settings."""

from collections.abc import Hashable, Sequence

import numpy as np

from specbench.stats.bootstrap import FEWEST
from specbench.stats.records import Result, RunRecord


def prompt_clusters(results: Sequence[Result]) -> list[Hashable]:
    """For the acceptance of guesses: the turns of one prompt are one cluster."""
    return [result.request.prompt_id for result in results]


def time_clusters(record: RunRecord, batch_size: int) -> list[Hashable]:
    """For times: with several rows also the requests of one group, which share calls."""
    return prompt_clusters(record.results) if batch_size == 1 else group_clusters(record)


def group_clusters(record: RunRecord) -> list[Hashable]:
    """The requests of one group are one cluster, and so are groups that share a prompt."""
    cluster_of: dict[str, int] = {}
    for number, group in enumerate(record.groups):
        prompts = {result.request.prompt_id for result in group.results}
        joined = {cluster_of[prompt] for prompt in prompts if prompt in cluster_of}
        if joined:  # a later turn of prompts that are known
            cluster_of |= {prompt: number for prompt, cluster in cluster_of.items() if cluster in joined}
        cluster_of |= dict.fromkeys(prompts, number)
    return [cluster_of[result.request.prompt_id] for result in record.results]


def halves(clusters: Sequence[Hashable]) -> dict[Hashable, int]:
    """0 or 1 for each cluster: halves of a run, of which one is judged by what the other says. Of two clusters that
    follow each other, one is in each half, by lot: a machine that drifts, and whatever turns from prompt to prompt, is
    the same in both. Empty if a half would have fewer than FEWEST clusters."""
    names = list(dict.fromkeys(clusters))
    if len(names) < 2 * FEWEST:
        return {}
    lots = np.random.default_rng(0).integers(2, size=(len(names) + 1) // 2)
    return {name: int(lots[place // 2] ^ (place % 2)) for place, name in enumerate(names)}
