"""`python -m specbench.collect`: the summary of a sweep, from the folders of its jobs."""

from specbench.contrib.cluster.collect import main

if __name__ == "__main__":
    main()
