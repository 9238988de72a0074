"""Kernels of rows, which the producers call: checks, views, plans, the launch, the reference."""
