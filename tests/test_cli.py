"""The command line: ``python -m cute_fp8``."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from own_process import python

import cute_fp8
from cute_fp8 import cli
from cute_fp8.targets import TARGETS


def test_module_explain() -> None:
    done = python("-m", "cute_fp8", "explain", "16", "4096", "4096", "--capability", "12.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{cute_fp8.explain(m=16, n=4096, k=4096, capability=(12, 0))}\n"
    assert "cute:gemm_sm120 for sm_120a" in done.stdout


def test_module_error() -> None:
    done = python("-m", "cute_fp8", "compile", "--arch", "sm_120")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"cute_fp8 compile: arch: got 'sm_120', must be one of {', '.join(TARGETS)} "
        "(did you mean sm_120a?)\n"
    )


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert text.endswith(f"{cute_fp8.dispatch_table()}\n")
    assert cli.main(["info", "--json"]) == 0
    printed = capsys.readouterr().out
    json.loads(printed)
    for version in (".".join(map(str, sys.version_info[:3])), torch.__version__):
        assert version in text and json.dumps(version) in printed


def test_explain_without_a_route_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "1", "64", "64", "--capability", "8.0", "--backend", "torch"]
    assert cli.main(arguments) == 1
    assert capsys.readouterr().out.endswith("\n  no route\n")


@pytest.mark.parametrize(
    ("arguments", "takes"),
    [
        (["16", "4096", "--op", "rmsnorm_quantize"], "cute:row_quantize"),
        (["4", "14336", "4096", "--op", "decoder_mlp"], "cute:mlp"),
        (["4", "1024", "--op", "rope_append", "--variant", "any"], "cute:rope_append"),
    ],
)
def test_explain_other_ops(
    arguments: list[str], takes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments, "--capability", "12.0"]) == 0
    assert f"takes   {takes} for sm_120a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["1"], "sizes: got 1, must be M N K, or M K of a producer"),
        (["1", "64"], "m, n, k: got 1, None, 64, must be sizes (m may be 0)"),
        (["1", "64", "64", "--op", "quantize"], "m, k: got 1, 64 and n 64, must be sizes"),
    ],
)
def test_explain_of_other_sizes_is_refused(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *arguments]) == 2
    assert f"cute_fp8 explain: {reason}" in capsys.readouterr().err


def test_explain_mxfp8(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "1", "64", "64", "--variant", "mxfp8", "--capability", "9.0"]) == 0
    assert capsys.readouterr().out.startswith("gemm mxfp8, M=1 N=64 K=64, out torch.bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "--arch", "sm_80"], "arch: got 'sm_80', must be one of sm_90a, sm_120a, "),
        (["compile", "--arch", "sm_120a", "--arch", "x"], "arch: got 'x', must be one of "),
        (
            ["compile", "--arch", "sm_120a", "--ops", "nothing*"],
            "ops: got 'nothing*', must match a kernel name such as gemm_per_token-",
        ),
    ],
)
def test_errors_of_use(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, one line on stderr, nothing on stdout, and before anything is compiled."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"cute_fp8 {arguments[0]}: {message}")
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["compile"],
        ["explain", "1", "64", "x"],
        ["explain"],
        ["explain", "1", "64", "64", "--capability", "12"],
        ["explain", "1", "64", "64", "--backend", "cuda"],
    ],
    ids=" ".join,
)
def test_errors_of_syntax(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: python -m cute_fp8")


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cute_fp8.tables", None)
    assert cli.main(["compile", "--arch", "sm_120a"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("cute_fp8 compile: needs the package 'cute_fp8.tables': pip")
    assert captured.err.count("\n") == 1


def test_a_failed_gate_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cute_fp8.evidence import inspection
    from cute_fp8.evidence.sass import Code

    code = Code(("QMMA.16832.F32.E4M3.E4M3",), 64, 0, 0, 0, 2, 16, 48)
    found = inspection.Inspection("kernel", "sm_120a", 8, 1024, 0.1, code, ("too slow",))
    monkeypatch.setattr(inspection, "inspect_kernels", lambda targets, ops: iter([found]))
    assert cli.main(["compile", "--arch", "sm_120a", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "gate failed: sm_120a kernel: too slow"
    assert "too slow" in json.dumps(json.loads(captured.out))
