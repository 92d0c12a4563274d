"""`python -m specbench.advise`: whether to speculate, with which drafter, at which batch size."""

from specbench.errors import answering

with answering():
    from specbench.run.compare import advise

if __name__ == "__main__":
    advise()
