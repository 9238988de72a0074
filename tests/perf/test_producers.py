"""The producers' measurement on the CPU: everything but the clock is real in its dry run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("jsonschema")
from cute_fp8 import timing  # noqa: E402
from cute_fp8.rows.case import row_case  # noqa: E402
from perf import inductor, producers, report, sweep  # noqa: E402
from perf.results_io import load  # noqa: E402


def test_a_row_for_every_implementation(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "producers.json"
    arguments = ["producers", "--dry-run", "--no-peers", "--plain", "--out", str(out)]
    assert sweep.main([*arguments, "--sizes", "16x64", "--ops", "quantize:mxfp8", "quantize"]) == 0
    data = load(out)
    impls = ["cute_fp8", "copy", "cute_fp8_no_pdl"]
    assert [row["impl"] for row in data["rows"]] == 2 * impls
    assert [row["variant"] for row in data["rows"]] == 3 * ["mxfp8"] + 3 * ["per_token"]
    for row in data["rows"]:
        assert row["impl"] in report.NAMES
        assert row["error"] < producers.LIMIT and ("route" in row) == (row["impl"] != "copy")
    text = capsys.readouterr().out
    assert "quantize mxfp8 8x64 us: cute_fp8 10.00, copy 11.00" in text and "x the copy" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(capsys: pytest.CaptureFixture) -> None:
    assert producers.main([]) == 2
    assert "got no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("op", "variant"), producers.OPS)
def test_the_peer_computes_the_same(op: str, variant: str) -> None:
    case = row_case(op, 32, 256, variant, **({"rounding": "hf"} if "norm" in op else {}))
    options = case.options
    x, weight, _, _ = case.inputs
    codes, scales = inductor.MATH[options.op](x, weight, variant, options.eps)
    ours = case.run()
    differing = (codes.view(torch.uint8) != ours[0].view(torch.uint8)).sum()
    assert int(differing) <= 1e-3 * codes.numel()
    bytes_or_not = torch.uint8 if variant == "mxfp8" else torch.float32
    assert torch.allclose(scales.float(), ours[1].view(bytes_or_not).float(), rtol=1e-5)


def test_a_wrong_result_is_no_measurement() -> None:
    cases = producers.copies_of(row_case("quantize", 8, 64), 10_000)

    def wrong(i: int) -> producers.Result:
        codes, scales = cases[i].run()
        codes.view(torch.uint8)[0, 0] ^= 1
        return producers.Result((codes, scales))

    call = producers.ours(cases, True)
    for impl, function, failed in (("cute_fp8", wrong, True), ("cute_fp8", call, False)):
        (row,) = timing.time_contenders(
            [producers.producer(impl, function, cases)], producers.fake_times
        )
        assert ("failed" in row) == failed


def test_every_copy_is_checked_against_its_own_input() -> None:
    cases = producers.copies_of(row_case("rmsnorm_quantize", 8, 64), 10_000)
    contender = producers.producer("inductor", producers.ours(cases, False), cases)
    assert contender.error(contender.call(1), 1) < timing.LIMIT
    assert contender.error(contender.call(1), 0) == float("inf")


def test_copies_differ_and_are_more_than_the_cache() -> None:
    case = row_case("quantize", 8, 64)
    cases = producers.copies_of(case, 10_000)
    assert sum(c.moved_bytes() for c in cases) >= 10_000
    assert len({c.inputs.x.data_ptr() for c in cases}) == len(cases)
    assert not torch.equal(cases[0].inputs.x, cases[1].inputs.x)
    assert len(producers.copies_of(replace(case), 10**12)) == producers.MOST_COPIES
