"""What is made ready for sizes to come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_fp8
from cute_fp8.build import compiler, shipped
from cute_fp8.targets import capability_of_target

SIZES = [(1, 10240, 5120), (2048, 10240, 5120)]


@pytest.mark.parametrize("target", ["sm_120a", "sm_90a"])
def test_sizes_to_come_take_what_is_made_ready(target: str) -> None:
    ready = shipped.configs_of(SIZES, target)
    assert len(set(ready)) == len(ready)
    capability = capability_of_target(target)
    bf16 = torch.bfloat16
    for m, n, k in SIZES:
        for given in ({}, {"bias": bf16}, {"residual": bf16}, {"op": "gemm_gated"}):
            options: dict[str, Any] = {"activation": "silu"} if "op" in given else {}
            route = cute_fp8.explain(m=m, n=n, k=k, capability=capability, **given, **options).route
            assert route is not None and route.pick is not None and route.pick.config in ready
        for op in ("rmsnorm_quantize", "silu_mul_quantize", "attention_out_quantize"):
            route = cute_fp8.explain(op, m=m, k=k, capability=capability).route
            assert route is not None and route.rows is not None
            assert route.rows in ready


def test_sizes_that_no_block_of_32_divides() -> None:
    ready = shipped.configs_of([(4, 24, 48)], "sm_120a")
    assert ready and not [c for c in ready if getattr(c, "variant", "") == "mxfp8"]
    with pytest.raises(ValueError, match=r"^xq: got K = 40, must be a positive multiple of 16$"):
        cute_fp8.compile("sm_120a", shapes=[(4, 24, 40)])


def test_sizes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.forget()
    built = []
    monkeypatch.setattr(compiler, "build", lambda *a, **k: built.append(a[0]) or len(a))
    report = cute_fp8.compile("sm_120a", "gemm_*", shapes=[(1, 64, 32)])
    assert [line[0] for line in report] == [config.name for config in built]
    assert {c.variant for c in built} == {"per_token", "mxfp8"}
