"""Compiled kernels on disk, shared: by processes that start at once or are killed, and by threads.

Run as a program, this file is one of the processes: ``test_cache_processes.py FUNCTION ARGUMENTS``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_fakes import KEY, OTHER, ROOT, SMALL, Fake, load_fake, names

import cute_fp8
from cute_fp8.build import cache, compiler, shipped, workers
from cute_fp8.build.cache_key import Key
from cute_fp8.kernels.config import GemmConfig
from cute_fp8.kernels.tiles import TILE_64x64

PROCESSES = 16


def process(function: str, *arguments: object, status: int = 0, cwd: Path = ROOT) -> str:
    """Run a function of this file in a process of its own."""
    return python(__file__, function, *arguments, status=status, cwd=cwd)


def python(*arguments: object, status: int = 0, cwd: Path = ROOT) -> str:
    """What a program of this Python prints, with this process's variables and packages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, text=True, capture_output=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert "RuntimeWarning" not in done.stderr, done.stderr
    return done.stdout


def test_a_second_process_loads_what_the_first_compiled(cache_folder: Path, tmp_path: Path) -> None:
    """With the very checks of the arguments that a fresh kernel has, and nothing left about."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    log = tmp_path / "log"
    assert process("get_small", log, cwd=elsewhere) == "Stats(hits=0, misses=1, rebuilt=0)\n"
    assert process("get_small", log, cwd=elsewhere) == "Stats(hits=1, misses=0, rebuilt=0)\n"
    assert log.read_text() == "built\n"
    assert list(elsewhere.iterdir()) == []
    (key,) = names(cache_folder, ".o")
    assert sorted(path.name for path in cache_folder.iterdir()) == [key.replace(".o", ".lock"), key]
    assert cache.size() == (1, (cache_folder / key).stat().st_size)
    assert cache.location() == cache_folder
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache_folder.iterdir()} == {0o600}
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700


def get_small(log: str) -> None:
    kernel = get_logged(log)
    if cache.stats().hits:
        refusals(kernel)


def get_logged(log: str) -> Callable[..., None]:
    """The small kernel; a line in the log if it is compiled here, and the statistics to stdout."""
    build = compiler.build

    def logged(config: GemmConfig, target: str) -> Any:
        with open(log, "a") as file:
            file.write("built\n")
        return build(config, target)

    compiler.build = logged  # type: ignore[assignment]
    kernel = compiler.get(SMALL, "sm_120a")
    print(cache.stats(), flush=True)
    return kernel


def refusals(kernel: Callable[..., None]) -> None:
    """What a compiled kernel says to wrong arguments, before it looks for a GPU."""
    codes, scales = torch.zeros((8, 16)).to(torch.float8_e4m3fn), torch.zeros(8)
    out = torch.zeros((8, 8), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="Expects 11 parameters"):
        kernel(codes)
    with pytest.raises(ValueError, match=r"argument #0 .* expected ndim=2"):
        kernel(scales, scales, codes, scales, None, None, out, None, None, None, 1)
    with pytest.raises(ValueError, match=r"argument #0 .* expected device_type=cuda"):
        kernel(codes, scales, codes, scales, None, None, out, None, None, None, 1)


def crowd(work: Callable[[int], object]) -> list[int | None]:
    """Processes that start at once, all imports done; their exit statuses."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES)

    def run(index: int) -> None:
        barrier.wait()
        work(index)

    members = [context.Process(target=run, args=(index,)) for index in range(PROCESSES)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    return [member.exitcode for member in members]


def test_cold_processes_that_want_one_kernel_compile_it_once(
    cache_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    found = process("crowd_gets_small", log).splitlines()
    assert log.read_text() == "built\n"
    hit, miss = (f"Stats(hits={hit}, misses={1 - hit}, rebuilt=0)" for hit in (1, 0))
    assert sorted(found) == [miss] + [hit] * (PROCESSES - 1)
    assert (
        len(names(cache_folder, ".o")) == 1
        and names(cache_folder, ".tmp") == names(cache_folder, ".bad") == []
    )


def crowd_gets_small(log: str) -> None:
    import cutlass  # noqa: F401

    assert set(crowd(lambda index: get_logged(log))) == {0}


def test_cold_processes_that_want_several_kernels_compile_each_once(
    fake_cache: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process("crowd_fetches", log, 0)
    assert sorted(log.read_text().splitlines()) == [f"object {kernel}" for kernel in range(5)]
    assert len(names(fake_cache, ".o")) == 5 and names(fake_cache, ".tmp") == []


def test_a_killed_compilation_is_taken_over(fake_cache: Path, tmp_path: Path) -> None:
    """The first to compile is killed with the lock in its hands."""
    log = tmp_path / "log"
    process("crowd_fetches", log, 1)
    built = log.read_text().splitlines()
    assert len(built) == 6 and len(set(built)) == 5
    assert len(names(fake_cache, ".o")) == 5


def crowd_fetches(log: str, killed: str) -> None:
    """Each member wants five kernels, in an order of its own; the first build may kill."""
    cache._load_object = load_fake

    def build(kernel: int) -> Fake:
        with open(log, "a") as file:
            first = file.tell() == 0
            file.write(f"object {kernel}\n")
        if first and killed == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return Fake(f"object {kernel}".encode())

    def work(index: int) -> None:
        for step in range(5):
            kernel = (index + step) % 5
            made = cache.fetch(Key(f"{kernel}".encode()), lambda kernel=kernel: build(kernel))
            assert getattr(made, "content", b"").decode() or made == f"object {kernel}"

    statuses = crowd(work)
    assert statuses.count(0) >= PROCESSES - int(killed), statuses
    assert statuses.count(-signal.SIGKILL) == PROCESSES - statuses.count(0)


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_read(fake_cache: Path) -> None:
    process("killed_before_the_rename", status=-signal.SIGKILL)
    (left,) = names(fake_cache, ".tmp")
    assert not cache.has(KEY)
    assert isinstance(cache.fetch(KEY, Fake), Fake)
    assert cache.fetch(KEY, Fake) == "object"
    assert names(fake_cache, ".tmp") == [left], "it might still be written"
    os.utime(fake_cache / left, (0, 0))
    cache.fetch(OTHER, Fake)
    assert names(fake_cache, ".tmp") == []


def killed_before_the_rename() -> None:
    cache.os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
    cache.fetch(KEY, Fake)


@pytest.mark.parametrize("kernels", [1, 3])
def test_threads_compile_each_kernel_once(
    kernels: int, fake_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [GemmConfig(TILE_64x64, e) for e in shipped.EPILOGUES[:kernels]]
    built: list[GemmConfig] = []

    def build(config: GemmConfig, target: str) -> Fake:
        time.sleep(0.02)
        built.append(config)
        return Fake()

    monkeypatch.setattr(compiler, "build", build)
    got: list[tuple[GemmConfig, object]] = []
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        barrier.wait()
        for step in range(kernels):
            config = configs[(index + step) % kernels]
            got.append((config, compiler.get(config, "sm_120a")))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == len(set(built)) == len(set(got)) == kernels
    assert len(got) == 8 * kernels
    assert cache.stats() == cache.Stats(hits=0, misses=kernels, rebuilt=0)


# ---------------------------------------------------------------------------- compile, start


def test_compile_fills_the_disk_in_other_processes(cache_folder: Path, tmp_path: Path) -> None:
    """From a script without ``if __name__ == "__main__"``, which must run once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, cute_fp8\n"
        "from cute_fp8.build import cache, compiler\n"
        "os.sched_getaffinity = lambda pid: {0, 1}\n"
        "compiler.build = None\n"
        "report = cute_fp8.compile('sm_120a', ops='gemm_per_token-32x64*-bias_bfloat16*')\n"
        "again = cute_fp8.compile('sm_120a', ops='gemm_per_token-32x64*-bias_bfloat16*')\n"
        "print(len(report), all(r[2] > 0.1 for r in report), all(r[2] < 0.1 for r in again))\n"
        "print(cache.stats())\n"
    )
    assert python(script) == "3 True True\nStats(hits=3, misses=0, rebuilt=0)\n"
    assert len(names(cache_folder, ".o")) == 3


def test_compile_without_a_disk(fake_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with one warning if there should be a disk."""
    built: list[str] = []
    monkeypatch.setattr(compiler, "build", lambda c, target: built.append(c.name) or Fake())
    monkeypatch.setattr(workers, "_Worker", lambda function: 1 / 0)
    fake_cache.mkdir()
    fake_cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write") as caught:
        report = cute_fp8.compile("sm_120a", ops="gemm_per_token-32x64*-bfloat16-*")
    assert len(caught) == 1
    assert [line[0] for line in report] == built and len(built) == 7


def test_a_process_with_its_kernels_on_disk_starts_at_once(tmp_path: Path) -> None:
    """At most a second beyond importing torch and the DSL, and nothing is compiled."""
    python("-m", "perf.start_time", tmp_path / "seconds.json")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
