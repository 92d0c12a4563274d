"""`python -m specbench.alpha`: alpha of a target and a drafter over texts, without decoding."""

from specbench.contrib.alpha.command import main

if __name__ == "__main__":
    main()
