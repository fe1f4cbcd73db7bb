"""Kernels of our own for NVIDIA GPUs, where what XLA makes of plain JAX is not enough."""
