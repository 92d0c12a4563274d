"""`python -m specbench.report`."""

from specbench.report.command import main

if __name__ == "__main__":
    main()
