"""``perf.configs``: the model's best few timed beside the plain tile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cute_fp8 import timing
from cute_fp8.gemms import tuning
from cute_fp8.kernels.tiles import TILES
from cute_fp8.timing import Contender

pytest.importorskip("jsonschema")
from perf import configs, results_io

PLAIN = TILES["per_token"][0].name


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection for an RTX 5090; the reference computes."""
    explain, pinned = tuning.explain, tuning._pinned
    monkeypatch.setattr(timing, "ROTATED_BYTES", 12_000)
    monkeypatch.setattr(tuning, "explain", lambda *a, **o: explain(*a, **o, gpu="RTX 5090"))
    monkeypatch.setattr(tuning, "_pinned", lambda _, *rest: pinned("reference", *rest))
    monkeypatch.setattr(tuning.compiler, "fill_disk", lambda configs, target: [])


def clock(found: Sequence[Contender]) -> dict[str, tuple[list[float], list[Tensor]]]:
    """The model's first takes 2 us, the next 3, ..."""
    return {
        c.impl: ([2.0 + i, 3.0 + i], [c.call(copy) for copy in range(c.copies)])
        for i, c in enumerate(found)
    }


def test_the_best_few_and_the_plain_tile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "configs.json"
    arguments = ["16x64x128", "1x32x64", "--best", "2", "--out", str(out)]
    assert configs.main(arguments, clock) == 0
    data = json.loads(out.read_text())
    assert results_io.schema_errors(data) == []
    by_shape: dict[int, list[dict[str, Any]]] = {}
    for row in data["rows"]:
        by_shape.setdefault(row["M"], []).append(row)
    assert [*by_shape] == [16, 1]
    for rows in by_shape.values():
        assert len(rows) == 3 and rows[-1]["tile"] == PLAIN
        predicted = [row["predicted_us"] for row in rows]
        assert predicted == sorted(predicted)
        assert [row["us"] for row in rows] == [2.5, 3.5, 4.5]
    text = capsys.readouterr().out
    assert text.count("the pick: 1.80x the plain tile's speed, 1.00 of the fastest one's") == 2


def test_each_under_dependent_launch_too(tmp_path: Path) -> None:
    out = tmp_path / "configs.json"
    assert configs.main(["16x64x128", "--best", "2", "--pdl", "--out", str(out)], clock) == 0
    names = [row["tile"] for row in json.loads(out.read_text())["rows"]]
    assert len(names) == 6 and names[-2:] == [PLAIN, f"{PLAIN}/pdl"]
    assert [f"{name}/pdl" for name in names[::2]] == names[1::2]


def test_a_wrong_configuration_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "_pinned", lambda *a: lambda i: (_ for _ in ()).throw(OSError("x")))
    assert configs.main(["16x64x128", "--best", "1"], clock) == 1
    assert "measured OSError: x" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["16x64", "0x64x64", "axbxc", "1x2x3x4"])
def test_bad_shapes(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        configs.main([shape])
    assert f"got '{shape}', must be like 16x4096x4096" in capsys.readouterr().err


def test_what_gemm_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert configs.main(["1x64x8"], clock) == 2
    assert capsys.readouterr().err == (
        "perf.configs: xq: got K = 8, must be a positive multiple of 16\n"
    )
