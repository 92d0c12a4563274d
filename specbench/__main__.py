"""`python -m specbench`: validates, builds, runs and writes. `--help` lists what can be set."""

from specbench.errors import answering

with answering():
    from specbench.run.command import main

if __name__ == "__main__":
    main()
