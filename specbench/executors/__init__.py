"""How functions of tensors run: as written, compiled, or as CUDA graphs."""
