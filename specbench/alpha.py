"""`python -m specbench.alpha`: alpha of a target and a drafter over texts, without decoding."""

from specbench.errors import answering

with answering():
    from specbench.run.alpha import main

if __name__ == "__main__":
    main()
