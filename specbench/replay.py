"""`python -m specbench.replay`: other gamma policies, simulated on a finished run."""

from specbench.contrib.replay.command import main

if __name__ == "__main__":
    main()
