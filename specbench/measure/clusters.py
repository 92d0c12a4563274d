"""Clusters of requests: those whose numbers may have something in common beside the settings."""

from collections.abc import Hashable, Sequence

from specbench.decoded import Record, Result


def prompt_clusters(results: Sequence[Result]) -> list[Hashable]:
    """For the acceptance of guesses: the turns of one prompt are one cluster."""
    return [result.request.prompt_id for result in results]


def time_clusters(record: Record, batch_size: int) -> list[Hashable]:
    """For times: with several rows also the requests of one group, which share calls; then groups that share a prompt
    are one cluster."""
    if batch_size == 1:
        return prompt_clusters(record.results)
    cluster_of: dict[str, int] = {}
    for number, group in enumerate(record.groups):
        prompts = {result.request.prompt_id for result in group.results}
        joined = {cluster_of[prompt] for prompt in prompts if prompt in cluster_of}
        if joined:  # a later turn of prompts that are known
            cluster_of |= {prompt: number for prompt, cluster in cluster_of.items() if cluster in joined}
        cluster_of |= dict.fromkeys(prompts, number)
    return [cluster_of[result.request.prompt_id] for result in record.results]
