"""What ``info`` and every result say about the machine."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_fp8
from cute_fp8 import cli, environment
from cute_fp8.environment import driver_verdict


def test_names_are_those_of_result_files() -> None:
    facts = environment.environment()
    names = ("cute_fp8", "kernels", "torch", "dsl", "python", "gpu", "capability", "driver")
    assert {*names, *environment.PACKAGES} == facts.keys()
    assert facts["cute_fp8"] == cute_fp8.__version__
    assert facts["torch"] == torch.__version__
    assert facts["dsl"] == metadata.version("nvidia-cutlass-dsl")
    assert all(isinstance(value, str) and value for value in facts.values())
    if not torch.cuda.is_available():
        assert facts["gpu"] == facts["capability"] == "none"


def test_it_needs_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    facts = environment.environment()
    assert facts["cute_fp8"] == cute_fp8.__version__
    assert facts["dsl"] == facts["numpy"] == "not installed"


def nvidia_smi(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, str]) -> list[list[str]]:
    """Let ``nvidia-smi`` answer, one status and text after the other; returns what is asked."""
    asked: list[list[str]] = []
    pending = list(answers)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        status, text = pending.pop(0)
        return subprocess.CompletedProcess(command, status, stdout=text, stderr="")

    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(environment.subprocess, "run", run)
    return asked


def test_driver_version(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = nvidia_smi(monkeypatch, (0, "580.159.04\n"))
    assert environment.driver() == "580.159.04"
    assert asked[0][1] == "--query-gpu=driver_version" and asked[0][-1].startswith("--id=")


def test_a_container_that_hides_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = nvidia_smi(monkeypatch, (6, "No devices were found\n"), (0, "600.00, [N/A]\n"))
    assert environment.nvidia_smi("power.limit", "clocks.sm") == {"power.limit": "600.00"}
    assert not asked[1][-1].startswith("--id=")


@pytest.mark.parametrize("text", ["", "garbage\n"])
def test_no_answer_is_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(monkeypatch, (9, text), (0, text))
    assert environment.nvidia_smi("power.limit", "clocks.sm") == {}


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    assert environment.driver() == "none"


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    assert environment.commit(tmp_path) == "abc1234"
    monkeypatch.delenv("GIT_COMMIT")
    assert environment.commit(tmp_path) == "unknown"
    if (environment.ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", environment.commit())


@pytest.mark.parametrize(
    ("driver", "built", "dsl", "verdict"),
    [
        (None, (13, 0), (12, 9), "no NVIDIA driver here: kernels can be compiled and inspected"),
        ((13, 0), (13, 0), (12, 9), "ok: the driver is for CUDA 13.0, torch is built with 13.0, "),
        ((13, 0), (12, 8), (13, 0), "ok: the driver is for CUDA 13.0, torch is built with 12.8, "),
        (
            (12, 8),
            (12, 8),
            (12, 9),
            "ok: the driver is for CUDA 12.8, older than the DSL's 12.9, whose machine code",
        ),
        ((13, 0), (13, 1), (13, 2), "ok: the driver is for CUDA 13.0, older than torch's 13.1 and"),
        ((12, 8), (13, 0), (12, 9), "the driver is for CUDA 12.8, torch is built with 13.0: upd"),
        ((12, 8), (12, 8), (13, 0), "the driver is for CUDA 12.8, the DSL compiles with 13.0: up"),
        ((12, 8), None, (12, 9), "the driver is for CUDA 12.8, but this torch is built without"),
        ((12, 8), (12, 8), "cannot be imported (x)", "the driver is for CUDA 12.8; the DSL cannot"),
    ],
)
def test_driver_against_toolkits(driver: Any, built: Any, dsl: Any, verdict: str) -> None:
    found = driver_verdict(driver, built, dsl)
    assert found.startswith(verdict)
    assert "\n" not in found


def test_the_toolkits_here() -> None:
    dsl = environment.dsl_cuda()
    assert isinstance(dsl, tuple) and dsl >= (12, 8), dsl
    built = environment.torch_cuda()
    assert built is None or built >= (12, 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'cutlass'"), "cannot be imported (No module named 'cutlass'"),
        (TypeError("bad operand\nmore"), "fails at import (TypeError: bad operand)"),
    ],
)
def test_a_dsl_that_does_not_import(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> None:
        raise error

    monkeypatch.setattr(environment.importlib, "import_module", import_module)
    found = environment.dsl_cuda()
    assert isinstance(found, str) and found.startswith(words)


def test_info_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for start in (
        "cute_fp8 ",
        "torch ",
        "GPUs ",
        "driver, toolkits ",
        "DSL wheels ",
        "kernel cach",
    ):
        assert re.search(rf"^{start}", text, re.MULTILINE), start


def test_info_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.keys() == {"versions", "gpus", "driver", "dsl", "cache"}
    assert data["versions"] == environment.environment()
    assert data["dsl"]["wheels"].keys() == {"versions", "faults", "repair"}


def test_info_prints_the_repair() -> None:
    facts = environment.info()
    facts["dsl"]["wheels"] = {"versions": {}, "faults": ["a: missing"], "repair": "pip install x"}
    assert "\n  a: missing\nmend it with: pip install x\n" in environment.info_text(facts)


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_FP8_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.o").write_bytes(b"12345")
    facts = environment.cache_facts()
    assert (facts["place"], facts["files"], facts["bytes"]) == (str(tmp_path), 1, 5)
    assert {"hits", "misses"} <= facts["stats"].keys()
    monkeypatch.setenv("CUTE_FP8_CACHE_DIR", "off")
    assert environment.cache_facts()["place"].startswith("off ")
