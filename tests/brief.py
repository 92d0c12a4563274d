"""What a run decodes besides its prompts is most of a small run: here as little as shows what depends on it.

`install` changes the process.
"""

from specbench.run import provenance, session


def install() -> None:
    session.TOKENS, session.SHORT = 1, 1
    provenance.CPU_BYTES = 2**20  # nothing depends on how much the machine's probe reads
