"""The decoder's measurement on the CPU: everything but the clock is real in its dry run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("jsonschema")
from cute_fp8.decoder.case import decoder_case
from perf import decoder
from perf.results_io import load


def test_a_row_for_every_case(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "decoder.json"
    cases = ["mlp-4096x14336-16", "layer-1024x4096-352", "layer-4096x14336-1"]
    arguments = ["--dry-run", "--no-peers", "--out", str(out), "--cases", *cases]
    assert decoder.main(arguments) == 0
    rows = load(out)["rows"]
    assert [row["op"] for row in rows] == ["decoder_mlp", "decoder_layer", "decoder_layer"]
    for row in rows:
        assert row["error"] < decoder.LIMIT
        assert row["route"] == "reference:separate_launches"
    assert "decoder_mlp 128x64 M=5 us: cute_fp8 10.00" in capsys.readouterr().out


@pytest.mark.parametrize("causal", [False, True])
def test_the_peers_compute_the_module(causal: bool) -> None:
    case = decoder.Case("layer", 128, 64, 2, 5, causal=causal)
    made = decoder_case(case.config, positions=5)
    x, weights = made.x(2, 5), decoder.bf16_weights(made.raw)
    wanted = made.module(x)
    plain = decoder.layer(x, weights, decoder.bf16_linear, case.config, *made.rotation, None)
    torch.testing.assert_close(plain, wanted, rtol=0.02, atol=0.05)
    half = decoder.mlp(x, weights, decoder.bf16_linear, case.config.eps)
    torch.testing.assert_close(half, made.mlp_module(x), rtol=0.02, atol=0.05)
    codes = decoder.w8a8_weights(weights)
    assert codes["qkv"].dtype == torch.float8_e4m3fn and codes["qkv.scale"].shape == (2560,)


def test_a_cache_goes_on_behind_what_is_there() -> None:
    case = decoder.Case("layer", 128, 64, 2, 1, cached=7)
    made = decoder_case(case.config, positions=8)
    x = made.x(2, 1)
    (memory,) = decoder.past(case, 1, x.device)
    before = tuple(t[:, :, :7].clone() for t in memory)
    weights = decoder.bf16_weights(made.raw)
    at = made.at(7, 1)
    y = decoder.layer(x, weights, decoder.bf16_linear, case.config, *at, memory)
    torch.testing.assert_close(y, made.module(x, before), rtol=0.02, atol=0.05)
    ours = decoder.ours(case, made, x, 2)
    assert float((ours(1).double() - y.double()).norm() / y.double().norm()) < decoder.LIMIT
    assert torch.equal(ours(0), ours(1)) and torch.equal(ours(1), ours(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu_and_known_cases(capsys: pytest.CaptureFixture) -> None:
    assert decoder.main([]) == 2
    assert "got no CUDA GPU" in capsys.readouterr().err
    assert decoder.main(["--dry-run", "--cases", "other"]) == 2
    assert "must name cases" in capsys.readouterr().err
