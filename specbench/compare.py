"""`python -m specbench.compare`: ways of decoding, compared on each prompt in turn."""

from specbench.run.compare_command import main

if __name__ == "__main__":
    main()
