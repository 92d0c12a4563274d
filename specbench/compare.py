"""`python -m specbench.compare`: methods, compared on each prompt in turn."""

from specbench.errors import answering

with answering():
    from specbench.run.compare import main

if __name__ == "__main__":
    main()
