"""`python -m specbench.collect`: runs of parts of one data set, as one run."""

from specbench.errors import answering

with answering():
    from specbench.run.collect import main

if __name__ == "__main__":
    main()
