"""Dtypes by name, and back."""

from __future__ import annotations

import pytest
import torch

from cute_fp8.dtypes import dtype_name, dtype_named


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, None])
def test_names_lead_back(dtype: torch.dtype | None) -> None:
    assert dtype_named(dtype_name(dtype)) is dtype
    assert dtype_name(torch.bfloat16) == "bfloat16"
