"""Work in other processes: in order, GPU-blind, and done whatever becomes of a process."""

from __future__ import annotations

import math
import os
import subprocess
import time

import pytest

from cute_fp8.build import workers

#: Ends the process that it is evaluated in, if that is one of the workers.
DIE = "__import__('os').environ['CUDA_VISIBLE_DEVICES'] or __import__('os')._exit(3)"
SLEEP = "__import__('time').sleep(60)"


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "here")


def test_results_come_in_order() -> None:
    squares = [float(n * n) for n in range(20)]
    assert list(workers.run(math.sqrt, squares)) == list(range(20))


def test_they_see_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """And what they print is none of the results."""
    look = "print('looked') or __import__('os').environ['CUDA_VISIBLE_DEVICES']"
    assert list(workers.run(eval, [look, look])) == ["", ""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "here"
    out, err = capfd.readouterr()
    assert out == "" and err.splitlines().count("looked") == 2


def test_errors_are_raised_here() -> None:
    found = workers.run(int, ["1", "x", "3"])
    assert next(found) == 1
    with pytest.raises(ValueError, match="invalid literal"):
        next(found)


def test_an_error_that_cannot_travel_says_the_same() -> None:
    odd = "(_ for _ in ()).throw(type('Odd', (Exception,), {})('what it says'))"
    with pytest.raises(RuntimeError, match="what it says"):
        list(workers.run(eval, [odd, "1"]))


def test_a_lost_process_costs_nothing_but_time() -> None:
    assert list(workers.run(eval, ["1", DIE, "3", DIE, "5"])) == [1, "here", 3, "here", 5]


def test_a_caller_that_stops_early_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        return started[-1]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    found = workers.run(eval, ["1", SLEEP, SLEEP, SLEEP])
    assert next(found) == 1
    start = time.monotonic()
    found.close()
    assert time.monotonic() - start < 10
    assert len(started) == 2 and all(process.poll() is not None for process in started)


@pytest.mark.parametrize("items", [[], ["16"]])
def test_few_items_need_no_process(items: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_Worker", lambda function: 1 / 0)
    assert list(workers.run(int, items)) == list(map(int, items))


def test_without_processes_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(workers, "_Worker", refuse)
    assert list(workers.run(int, ["1", "2", "3"])) == [1, 2, 3]
