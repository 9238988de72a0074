"""Evidence about a kernel lasts as long as its own sources do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cute_fp8.build import kernel_sources
from cute_fp8.dispatch import TABLE


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Digests of the kernels with one file having another line, or one more file."""

    def digests(name: str) -> dict[str, str]:
        folder = tmp_path / name
        shutil.copytree(kernel_sources.FOLDER, folder)
        with (folder / f"{name}.py").open("a", encoding="utf-8") as file:
            file.write("\n_LINE = 1\n")
        monkeypatch.setattr(kernel_sources, "FOLDER", folder)
        return kernel_sources.digests.__wrapped__()

    return digests


def test_every_kernel_of_the_table_has_a_digest() -> None:
    assert {entry.kernel for entry in TABLE if entry.targets} <= kernel_sources.digests().keys()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gemm_sm90", {"gemm_sm90"}),
        ("mainloop_sm90", {"gemm_sm90"}),
        ("rope_append", {"rope_append"}),
        ("split_k", {"gemm_sm120", "gemm_sm90"}),
        ("row_norm", {"row_quantize", "mlp", "projection"}),
        ("tiles", set()),
        ("one_more", set()),
    ],
)
def test_a_change_concerns_the_kernels_that_import_it(edited, name, changed) -> None:
    before, after = kernel_sources.digests(), edited(name)
    assert {kernel for kernel in before if before[kernel] != after[kernel]} == changed


def test_a_line_holds_them_all() -> None:
    line = kernel_sources.as_line()
    assert "\n" not in line
    assert kernel_sources.recorded(line) == kernel_sources.digests()
    assert kernel_sources.recorded("0123456789ab") == {}
