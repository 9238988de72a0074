"""How row kernels address x whatever its strides, and which kernels there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_fp8.kernels.config import VARIANTS
from cute_fp8.kernels.row_config import (
    NORMS,
    ROW_OPS,
    STREAMS,
    RowConfig,
    shape_of,
    shipped_rows,
)
from cute_fp8.rows.case import row_case
from cute_fp8.rows.problem import OPS, RowInputs, RowOptions, check_rows
from cute_fp8.rows.selection import config_of
from cute_fp8.rows.view import View, view_of

BF16 = torch.bfloat16


def seen(x: Tensor, op: str = "quantize") -> View:
    return view_of(x, check_rows(RowInputs(x), RowOptions(op)))


def test_views() -> None:
    x = torch.zeros(4, 6, 256, dtype=BF16)
    assert seen(x) == View("matrix", (24, 256), (256, 1))
    assert seen(x[:, :, :128]) == View("matrix", (24, 128), (256, 1))
    assert seen(x[:, :5]) == View("heads", (4, 5, 1, 256), (1536, 256, 0, 1))
    assert seen(x[1, :1, :64]) == View("matrix", (1, 64), (64, 1))
    assert seen(x[0, 0, 64:]) == View("matrix", (1, 192), (192, 1))
    assert seen(x[:, :, 1:129]).name == "scattered"
    assert seen(x.view(24, 256).t()[:, :16]) == View("scattered", (1, 256, 1, 16), (0, 1, 0, 256))
    assert seen(x.view(2, 2, 6, 256)[:, :1, :5]).name == "heads"
    assert seen(x.view(2, 2, 2, 3, 256)[:, :1, :, :2]).copy
    o = torch.zeros(2, 5, 3, 32, dtype=BF16).transpose(1, 2)
    assert seen(o, "attention_out_quantize") == View("matrix", (10, 96), (96, 1))
    dense = torch.zeros(2, 3, 5, 32, dtype=BF16)
    want = View("heads", (2, 5, 3, 32), (480, 32, 160, 1))
    assert seen(dense, "attention_out_quantize") == want


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_hold_the_row_with_few_idle_threads(op: str, variant: str) -> None:
    for k in range(16, 40_000, 16):
        for dtype in ("bfloat16", "float32"):
            shape = shape_of(k, op, variant, dtype)
            # What a call returns beside its codes changes no sum.
            if op in NORMS:
                assert shape == shape_of(k, op, variant, dtype, keep=True)
            if shape is STREAMS:
                assert k > (16_384 if op in NORMS or dtype == "float32" else 32_768)
                continue
            assert shape.elements >= k > shape.elements - 256 * shape.chunks
            assert shape.full == (shape.elements == k)
            assert shape.cta_threads % 32 == 0 and 128 % shape.rows == 0
            # A multiprocessor of any target holds so many threads, of so many registers.
            config = RowConfig(op, dtype, variant, shape, weight=dtype if op in NORMS else None)
            assert config.ctas >= 1 and config.ctas * shape.cta_threads <= 2048


def test_configurations() -> None:
    names = [config.name for config in shipped_rows()]
    assert len(set(names)) == len(names)
    for op in OPS:
        case = row_case(op, 2, 64)
        problem = replace(case.problem, view=view_of(case.inputs.x, case.problem))
        config = config_of(problem, False)
        assert (config.op in NORMS) == (config.weight is not None)
    for wrong in (
        {"op": "relu"},
        {"view": "rows"},
        {"weight": "float32"},
        {"residual": True},
    ):
        good = {"op": "quantize", "dtype": "float32", "variant": "per_token", "shape": STREAMS}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RowConfig(**{**good, **wrong}).check()  # type: ignore[arg-type]
