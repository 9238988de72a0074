"""Compiled kernels: what is shipped, how it is built, and the cache on disk that keeps it."""
