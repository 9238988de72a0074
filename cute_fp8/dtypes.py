"""Dtypes by name: configurations of kernels know no torch."""

from __future__ import annotations

from typing import overload

import torch


@overload
def dtype_name(dtype: torch.dtype) -> str: ...
@overload
def dtype_name(dtype: None) -> None: ...
@overload
def dtype_name(dtype: torch.dtype | None) -> str | None: ...
def dtype_name(dtype: torch.dtype | None) -> str | None:
    """``bfloat16`` for ``torch.bfloat16``, None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def dtype_named(name: str | None) -> torch.dtype | None:
    """The inverse."""
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found
