"""`python -m specbench.plan`: how many prompts, tokens and devices an answer needs."""

from specbench.contrib.planning.command import main

if __name__ == "__main__":
    main()
