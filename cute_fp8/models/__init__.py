"""Whole models: the ``Linear`` module, conversion, checkpoints, tensor parallelism."""
