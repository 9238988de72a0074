"""What autotuning found, on disk: kept, found again, never in the way."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_fp8.build import cache
from cute_fp8.gemms import winners
from cute_fp8.gemms.choice import Choice, parse
from cute_fp8.kernels.tiles import TILES

GPU, PROBLEM = "RTX 5090", "gemm_per_token-1x64x64-bfloat16"
CHOICE, OTHER = (Choice(tile, 2) for tile in TILES["per_token"][:2])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, of a process that has not seen any."""
    path = tmp_path / "cache"
    monkeypatch.setenv(cache.VARIABLE, str(path))
    monkeypatch.setattr(cache, "_read_only", set())
    monkeypatch.setattr(cache, "_warned", set())
    winners.forget()
    yield path
    winners.forget()


def test_a_winner_is_found_again_by_the_next_process(folder: Path) -> None:
    assert winners.winner(GPU, PROBLEM) is None
    assert winners.keep(GPU, {PROBLEM: (CHOICE, 12.3456)}) == folder / winners.FILE
    assert winners.winner(GPU, PROBLEM) == CHOICE
    winners.forget()  # as a new process
    assert winners.winner(GPU, PROBLEM) == CHOICE
    assert winners.winner("RTX 5080", PROBLEM) is None
    assert winners.winner(GPU, "another") is None
    ((versions, entries),) = json.loads((folder / winners.FILE).read_text())[GPU].items()
    assert versions.startswith("dsl ") and ", cute_fp8 " in versions
    assert entries == {PROBLEM: {"config": CHOICE.name, "us": 12.346}}
    assert (folder / winners.FILE).stat().st_mode & 0o077 == 0
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []


def test_what_others_found_meanwhile_stays(folder: Path) -> None:
    winners.keep(GPU, {PROBLEM: (CHOICE, 1.0)})
    winners.forget()
    winners.keep("RTX 5080", {PROBLEM: (OTHER, 2.0)})
    winners.keep(GPU, {"another": (OTHER, 3.0)})
    winners.forget()
    assert winners.winner(GPU, PROBLEM) == CHOICE
    assert winners.winner(GPU, "another") == winners.winner("RTX 5080", PROBLEM) == OTHER


def test_another_version_has_winners_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    winners.keep(GPU, {PROBLEM: (CHOICE, 1.0)})
    monkeypatch.setattr(winners, "_versions", lambda: "dsl 9, cute_fp8 9")
    winners.forget()
    assert winners.winner(GPU, PROBLEM) is None
    winners.keep(GPU, {PROBLEM: (OTHER, 1.0)})
    monkeypatch.undo()
    winners.forget()


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "7", '{"a": 1', "\x00\xff", "null", "[" * 100_000]
)
def test_a_corrupt_file_is_ignored_with_one_warning_and_rewritten(
    folder: Path, content: str
) -> None:
    folder.mkdir(mode=0o700)
    path = folder / winners.FILE
    path.write_text(content, encoding="latin-1")

    def look_twice_and_keep() -> None:
        assert winners.winner(GPU, PROBLEM) is None
        assert winners.winner(GPU, PROBLEM) is None
        winners.keep(GPU, {PROBLEM: (CHOICE, 1.0)})

    with pytest.warns(RuntimeWarning) as caught:
        look_twice_and_keep()
    (warning,) = caught
    assert "has a bad file, ignored until the next autotuning rewrites it" in str(warning.message)
    assert winners.FILE in str(warning.message) and "\n" not in str(warning.message)
    winners.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert winners.winner(GPU, PROBLEM) == CHOICE


@pytest.mark.parametrize(
    "entry", [None, 7, {}, {"config": 7}, {"config": "nonsense"}, {"config": "1x1x1_s1_w1x1"}]
)
def test_an_entry_that_is_nothing_we_know_is_passed_over(folder: Path, entry: object) -> None:
    winners.keep(GPU, {"good": (CHOICE, 1.0)})
    path = folder / winners.FILE
    everything = json.loads(path.read_text())
    (entries,) = everything[GPU].values()
    entries[PROBLEM] = entry
    path.write_text(json.dumps({**everything, "RTX 5080": 7}))
    winners.forget()
    assert winners.winner(GPU, PROBLEM) is None
    assert winners.winner("RTX 5080", PROBLEM) is None
    assert winners.winner(GPU, "good") == CHOICE
    winners.keep(GPU, {PROBLEM: (OTHER, 1.0)})
    winners.keep("RTX 5080", {PROBLEM: (OTHER, 1.0)})
    winners.forget()
    assert winners.winner(GPU, PROBLEM) == winners.winner("RTX 5080", PROBLEM) == OTHER


def keep_in_vain() -> None:
    """Twice."""
    assert winners.keep(GPU, {PROBLEM: (CHOICE, 1.0)}) is None
    assert winners.keep(GPU, {"another": (OTHER, 1.0)}) is None


def test_a_folder_that_cannot_be_written_costs_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(folder.parent / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="is not used: ") as caught:
        keep_in_vain()
    assert len(caught) == 1
    # This process takes them all the same.
    assert winners.winner(GPU, PROBLEM) == CHOICE


def test_a_write_that_fails_leaves_the_old_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winners.keep(GPU, {PROBLEM: (CHOICE, 1.0)})

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.warns(RuntimeWarning, match="No space left") as caught:
        keep_in_vain()
    assert len(caught) == 1
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []
    winners.forget()
    assert winners.winner(GPU, PROBLEM) == CHOICE
    assert winners.winner(GPU, "another") is None


def test_without_a_disk_winners_last_as_long_as_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(cache.VARIABLE, "off")
    assert winners.keep(GPU, {PROBLEM: (CHOICE, 1.0)}) is None
    assert winners.winner(GPU, PROBLEM) == CHOICE
    winners.forget()
    assert winners.winner(GPU, PROBLEM) is None


def test_the_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winners.keep(GPU, {PROBLEM: (CHOICE, 1.0)})
    winners.forget()
    reads = []
    read = winners._read
    monkeypatch.setattr(winners, "_read", lambda path: reads.append(path) or read(path))
    for _ in range(3):
        assert winners.winner(GPU, PROBLEM) == parse(CHOICE.name)
    assert reads == [folder / winners.FILE]
