"""What a run decodes besides its prompts is most of a small run: here as little as shows what depends on it.

`install` changes the process.
"""

from specbench.run import provenance, warm_up


def install() -> None:
    warm_up.TOKENS, warm_up.SHORT = 1, 1
    provenance.CPU_BYTES = 2**20  # nothing depends on how much the machine's probe reads
