"""`python -m specbench.claim`: whether a published result agrees with a run here, or the claim of a run."""

from specbench.errors import answering

with answering():
    from specbench.run.claim import main

if __name__ == "__main__":
    main()
