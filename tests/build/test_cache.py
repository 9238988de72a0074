"""Compiled kernels on disk: found, kept whole, never in the way."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest
from cache_fakes import KEY, OTHER, Fake, names

from cute_fp8.build import cache

NOBODY = 65534


def mounted(path: Path, options: str) -> Iterator[Path]:
    """A file system of its own, for root."""
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs leave to mount a tmpfs, as root mostly has")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


# ---------------------------------------------------------------------------- finding


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/cute_fp8"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/cute_fp8"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/cute_fp8"),
        ({cache.VARIABLE: "there", "XDG_CACHE_HOME": "xdg"}, "there"),
        ({cache.VARIABLE: "~/kernels"}, "home/kernels"),
        *(({cache.VARIABLE: off}, None) for off in ("", "0", "off", " OFF ")),
    ],
)
def test_location(
    variables: dict[str, str],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value in ("xdg", "there") else value)
    assert cache.location() == (expected and tmp_path / expected)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    assert cache.location() == tmp_path / "home/.cache/cute_fp8", "as the XDG standard has it"


@pytest.mark.parametrize("off", [{cache.VARIABLE: "off"}, {"CUTE_DSL_KEEP": "ptx"}])
def test_no_disk(fake_cache: Path, off: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is off, and where the DSL is asked to keep what only a compilation has."""
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    made = Fake()
    assert cache.fetch(KEY, lambda: made) is made
    assert not cache.has(KEY) and not fake_cache.exists() and cache.stats() == (0, 0, 0)


def test_hits_and_misses_are_counted(fake_cache: Path) -> None:
    made = Fake()
    assert not cache.has(KEY)
    assert cache.fetch(KEY, lambda: made) is made
    assert cache.has(KEY) and not cache.has(OTHER)
    assert cache.fetch(KEY, Fake) == cache.fetch(KEY, Fake) == "object"
    assert cache.stats() == cache.Stats(hits=2, misses=1, rebuilt=0)


def test_a_failed_build_is_the_callers_to_know(fake_cache: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.fetch(KEY, lambda: 1 // 0)
    assert names(fake_cache, ".o") == names(fake_cache, ".tmp") == []
    assert isinstance(cache.fetch(KEY, Fake), Fake), "the lock was let go"


# ---------------------------------------------------------------------------- bad files


def cut(count: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, count if count >= 0 else path.stat().st_size + count)


def flip(offset: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return change


def other_key(path: Path) -> None:
    cache.fetch(OTHER, Fake)
    path.write_bytes((path.parent / f"{OTHER.digest}.o").read_bytes())


def symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


def another_owner(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a file away")
    os.chown(path, NOBODY, NOBODY)


BAD = {
    "empty": cut(0),
    "cut-1": cut(1),
    "cut-in-the-object": cut(3),
    "cut-in-the-line": cut(12),
    "cut-last-byte": cut(-1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped-object": flip(0),
    "flipped-line": flip(10),
    "flipped-digest": flip(-40),
    "flipped-end": flip(-1),
    "other-key": other_key,
    "elf": lambda path: path.write_bytes(b"\x7fELF" + bytes(100_000)),
    "group-writable": lambda path: path.chmod(0o620),
    "world-writable": lambda path: path.chmod(0o602),
    "another-owner": another_owner,
    "symlink": symlink,
    "folder": replaced(Path.mkdir),
    "pipe": replaced(os.mkfifo),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_set_aside_and_compiled_anew(
    fake_cache: Path, spoil: Callable[[Path], object]
) -> None:
    cache.fetch(KEY, Fake)
    path = fake_cache / f"{KEY.digest}.o"
    spoil(path)
    misses = cache.stats().misses
    assert not cache.has(KEY)
    with pytest.warns(RuntimeWarning, match=rf"bad file, set aside .*{KEY.digest}") as caught:
        assert isinstance(cache.fetch(KEY, Fake), Fake)
    assert len(caught) == 1
    assert cache.stats() == cache.Stats(hits=0, misses=misses + 1, rebuilt=1)
    assert os.path.lexists(path.with_suffix(".bad"))
    assert cache.fetch(KEY, Fake) == "object"


def test_what_the_loader_refuses_is_compiled_anew(
    fake_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.fetch(KEY, Fake)

    def refuse(path: Path) -> None:
        raise RuntimeError("section table goes past\nthe end of file")

    monkeypatch.setattr(cache, "_load_object", refuse)
    with pytest.warns(RuntimeWarning, match="section table goes past$"):
        assert isinstance(cache.fetch(KEY, Fake), Fake)
    assert cache.has(KEY)


# ---------------------------------------------------------------------------- bad folders


def fetch_both(expected: str | None, warning: str) -> None:
    """Fetch twice: a kernel comes out, with one warning in all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert isinstance(cache.fetch(OTHER, lambda: Fake(bytes(100_000))), Fake)
        assert expected is None or cache.fetch(KEY, Fake) == expected
    assert [warning in str(w.message) for w in caught] == [True], list(map(str, caught))


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(fake_cache: Path, mode: int) -> None:
    fake_cache.mkdir()
    fake_cache.chmod(mode)
    fetch_both(None, f"{fake_cache} is not used: others can write there")
    assert list(fake_cache.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_not_used(fake_cache: Path) -> None:
    fake_cache.write_text("a file")
    fetch_both(None, f"{fake_cache} is not used: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_read_only_folder_still_serves(fake_cache: Path) -> None:
    cache.fetch(KEY, Fake)
    fake_cache.chmod(0o500)
    fetch_both("object", "gets no new kernels: ")
    fake_cache.chmod(0o700)


def test_a_read_only_file_system_still_serves(fake_cache: Path) -> None:
    for _ in mounted(fake_cache, "size=1m"):
        cache.fetch(KEY, Fake)
        subprocess.run(["mount", "-o", "remount,ro", str(fake_cache)], check=True)
        fetch_both("object", "gets no new kernels: [Errno 30] Read-only file system")


@pytest.mark.parametrize("limit", ["size=64k", "size=1m,nr_inodes=4"])
def test_a_full_file_system_still_serves(fake_cache: Path, limit: str) -> None:
    """Out of bytes half-way through a file; out of files with the lock in place."""
    for _ in mounted(fake_cache, limit):
        cache.fetch(KEY, Fake)
        fetch_both("object", "gets no new kernels: [Errno 28] No space left on device")
        assert names(fake_cache, ".tmp") == [] and names(fake_cache, ".o") == [f"{KEY.digest}.o"]


@pytest.mark.parametrize(
    "trouble",
    [
        (filelock.FileLock, "acquire", NotImplementedError("no flock")),
        (filelock.FileLock, "acquire", OSError(errno.ENOLCK, "No locks available")),
        (os, "fsync", OSError(errno.EIO, "Input/output error")),
        (os, "replace", OSError(errno.ESTALE, "Stale file handle")),
        (Fake, "export_to_c", RuntimeError("the DSL cannot export")),
    ],
    ids=lambda trouble: f"{trouble[1]}-{trouble[2]}",
)
def test_what_a_network_folder_may_do(
    fake_cache: Path, trouble: tuple[object, str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, error = trouble
    cache.fetch(KEY, Fake)
    tried: list[object] = []

    def fail(*arguments: object, **options: object) -> None:
        tried.append(arguments)
        raise error

    monkeypatch.setattr(where, name, fail)
    fetch_both("object", f"gets no new kernels: {error}")
    assert names(fake_cache, ".tmp") == []
    assert len(tried) == 1, "and never again"


def test_a_lock_that_is_held_for_too_long(
    fake_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    fake_cache.mkdir(mode=0o700)
    with open(fake_cache / f"{KEY.digest}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(RuntimeWarning, match=r"is busy: .* locked for 0 s"):
            assert isinstance(cache.fetch(KEY, Fake), Fake)
        assert not cache.has(KEY), "without the lock, nothing is written"
    cache.fetch(KEY, Fake)
    assert cache.has(KEY)
