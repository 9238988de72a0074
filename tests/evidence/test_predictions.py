"""The predicted times of ARCHS.md are the model's, and are called what they are."""

from __future__ import annotations

import pytest

from cute_fp8 import gpus
from cute_fp8.dispatch import explain
from cute_fp8.evidence import archs
from cute_fp8.evidence.predictions import SHAPES, SM120, predicted_us, rows
from cute_fp8.kernels.tiles import TILES


def test_the_shapes_and_gpus_are_those_that_people_have() -> None:
    assert len(SHAPES) == len(set(SHAPES)) == 4 + 2 + 12
    assert {gpu.capability for gpu in SM120} == {(12, 0), (12, 1)} and len(SM120) == 8


@pytest.mark.parametrize("variant", TILES)
def test_a_table_has_a_time_for_every_shape_and_gpu(variant: str) -> None:
    head, *lines = rows(variant)
    assert head == ("M x N x K", *(gpu.name for gpu in SM120))
    assert [line[0] for line in lines] == [f"{m} x {n} x {k}" for m, n, k in SHAPES]
    for shape, line in zip(SHAPES, lines, strict=True):
        for gpu, cell in zip(SM120, line[1:], strict=True):
            assert float(cell) == pytest.approx(predicted_us(shape, variant, gpu), rel=0.02)


def test_a_time_is_what_explain_predicts() -> None:
    found = explain(m=352, n=8192, k=1024, gpu="RTX 5070 Ti")
    us = predicted_us((352, 8192, 1024), "per_token", gpus.RTX_5070_TI)
    assert f"  {us:.1f}  " in str(found)


def test_archs_calls_them_predicted() -> None:
    text = archs.render([])
    section = text.split("## Predicted\n")[1].split("\n## ")[0]
    assert "Nobody has measured them." in section
    for variant in TILES:
        for line in rows(variant):
            assert "| " + " | ".join(line) + " |" in section
    assert text.count("| 8192 x 8192 x 8192 |") == len(TILES)
