"""`python -m specbench.train`: trains heads, look-ahead embeddings, exits and drafters."""

from specbench.train.command import main

if __name__ == "__main__":
    main()
