"""Semantics of every op in plain PyTorch with fp32 accumulation: the definition, and the CPU implementation."""
