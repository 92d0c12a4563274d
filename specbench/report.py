"""`python -m specbench.report`: one HTML page of finished runs, with its figures."""

from specbench.results.report.command import main

if __name__ == "__main__":
    main()
