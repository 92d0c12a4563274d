"""Kernels of our own: for GPUs in Triton, and the product of a CPU in C++."""
