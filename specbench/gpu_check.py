"""`python -m specbench.gpu_check`: checks the CUDA path on this machine."""

from specbench.contrib.gpu_check.command import main

if __name__ == "__main__":
    main()
