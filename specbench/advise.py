"""`python -m specbench.advise target.path=P`: whether to speculate, with what, and what it gains."""

from specbench.contrib.advise.command import main

if __name__ == "__main__":
    main()
