"""Kernels of rows, which the producers call: checks, views, the launch, the reference."""
