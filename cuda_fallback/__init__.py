"""NVIDIA implementations of the ops, in Triton. Imported only where a CUDA tensor asks for it."""
