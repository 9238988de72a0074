"""What a kernel's file is named after: a change of anything that it depends on is another key."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cute_fp8.build import cache_key
from cute_fp8.build.cache_key import key_of, must_compile
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig, RelayoutConfig
from cute_fp8.kernels.tiles import TILE_64x64

SMALL = GemmConfig(TILE_64x64, EpilogueConfig())
OPTIONS = "--enable-tvm-ffi --gpu-arch sm_120a"


def test_what_is_asked_for_counts() -> None:
    keys = [
        key_of(SMALL, "sm_120a", OPTIONS),
        key_of(SMALL, "sm_121a", OPTIONS),
        key_of(SMALL, "sm_120a", f"{OPTIONS} --opt-level 2"),
        key_of(replace(SMALL, tile=replace(TILE_64x64, stages=7)), "sm_120a", OPTIONS),
        key_of(replace(SMALL, epilogue=EpilogueConfig(bias="float32")), "sm_120a", OPTIONS),
        key_of(replace(SMALL, variant="mxfp8"), "sm_120a", OPTIONS),
        key_of(RelayoutConfig(), "sm_120a", OPTIONS),
    ]
    assert len({key.digest for key in keys}) == len(keys)
    assert key_of(SMALL, "sm_120a", OPTIONS) == keys[0]
    assert b"\n" not in keys[0].line
    assert json.loads(keys[0].line)["kernel"] == SMALL.name


@pytest.mark.parametrize("part", sorted(cache_key._surroundings()))
def test_what_it_is_compiled_with_counts(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(SMALL, "sm_120a", OPTIONS)
    changed = cache_key._surroundings() | {part: "another"}
    monkeypatch.setattr(cache_key, "_surroundings", lambda: changed)
    assert key_of(SMALL, "sm_120a", OPTIONS).digest != before.digest


def test_surroundings() -> None:
    found = cache_key._surroundings()
    assert {"sources", "cute-fp8", "nvidia-cutlass-dsl", "apache-tvm-ffi"} < found.keys()
    assert {"cuda", "python", "machine", "cpu"} < found.keys()
    assert found["cuda"].split(".")[0] in ("12", "13")
    assert "none" not in (found["nvidia-cutlass-dsl"], found["apache-tvm-ffi"])


def test_every_byte_of_the_kernels_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cache_key.FOLDER, tmp_path / "kernels")
    before = cache_key.digest_of_sources()
    monkeypatch.setattr(cache_key, "FOLDER", tmp_path / "kernels")
    assert cache_key.digest_of_sources() == before
    seen = {before}
    for path in sorted((tmp_path / "kernels").glob("*.py")):
        os.utime(path, (0, 0))
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        seen.add(cache_key.digest_of_sources())
        path.write_bytes(text)
        assert cache_key.digest_of_sources() == before
    (tmp_path / "kernels" / "new.py").touch()
    seen.add(cache_key.digest_of_sources())
    assert len(seen) == 1 + len(list((tmp_path / "kernels").glob("*.py")))


@pytest.mark.parametrize("name", ["LINEINFO", "COMPILER_OPT", "SOME_DAY"])
def test_variables_of_the_dsl_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(SMALL, "sm_120a", OPTIONS).digest
    monkeypatch.setenv(f"CUTE_DSL_{name}", "1")
    assert key_of(SMALL, "sm_120a", OPTIONS).digest != before
    assert not must_compile()


@pytest.mark.parametrize("name", ["ARCH", "CACHE_DIR", "DUMP_DIR", "LIBS", "LOG_LEVEL"])
def test_variables_that_change_no_kernel_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(SMALL, "sm_120a", OPTIONS)
    monkeypatch.setenv(f"CUTE_DSL_{name}", "1")
    assert key_of(SMALL, "sm_120a", OPTIONS) == before
    assert not must_compile()


@pytest.mark.parametrize(
    "name", ["KEEP", "KEEP_PTX", "PRINT_IR", "DRYRUN", "NO_CACHE", "DISABLE_FILE_CACHING"]
)
def test_variables_that_only_a_compilation_can_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"CUTE_DSL_{name}", "1")
    assert must_compile()
