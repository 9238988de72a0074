"""How contenders are timed, on the CPU, where only the clock is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_fp8 import timing
from cute_fp8.timing import Contender


def clock(found: Sequence[Contender]) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Every call takes 2 us."""
    return {c.impl: ([2.0, 1.0, 3.0], [c.call(i) for i in range(c.copies)]) for c in found}


def contender(call: Callable[[int], Tensor], impl: str = "x") -> Contender:
    """The product of ones and the rotated identity, more or less."""
    return Contender(impl, call, 3, exact().double())


def exact() -> Tensor:
    return torch.arange(1.0, 13.0).view(3, 4)


def right(copy: int) -> Tensor:
    return exact().roll(copy, 1).bfloat16()


def refuse(copy: int) -> Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling\nmore")


def one_element_off(copy: int) -> Tensor:
    y = right(copy)
    y[1, 2] += 4
    return y


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refuse, "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED when calling"),
        (one_element_off, "wrong: an element is far off"),
        (lambda i: right(i) * float("nan"), "wrong: an element is far off"),
        (lambda i: right(i)[:2], "wrong: an element is far off"),
        (lambda i: right(i).float() * 1.007, "wrong: relative L2 error 0.007"),
        (lambda i: right(0), "wrong after the timing: an element is far off"),
    ],
)
def test_what_is_wrong_is_not_timed(call: Callable[[int], Tensor], words: str) -> None:
    fine, wrong = timing.time_contenders([contender(right, "fine"), contender(call)], clock)
    assert fine["us"] == 2.0 and fine["error"] == 0.0
    assert wrong["failed"].startswith(words) and "us" not in wrong


def test_a_contender_that_cannot_be_captured() -> None:
    (row,) = timing.time_contenders([contender(right)], lambda found: {})
    assert row["failed"] == "cannot be captured in a CUDA graph"


class Driver:
    """CUDA graphs and events that only take notes: the n-th replay lasts n ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.replays: list[int] = []
        for name in ("CUDAGraph", "Event", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def synchronize(self) -> None:
        pass

    def graph(self, graph: Any) -> AbstractContextManager[Any]:
        return nullcontext(graph)

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=partial(self.replays.append, 0))

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", len(self.replays))
        event.elapsed_time = lambda end: float(end.at * (end.at - event.at))
        return event


def test_graphs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    calls: list[int] = []

    def noted(copy: int) -> Tensor:
        calls.append(copy)
        return right(copy)

    found = [contender(noted, "a"), contender(refuse, "b"), contender(right, "c")]
    timed = timing.graph_times(found)
    assert list(timed) == ["a", "c"]
    # Whole rounds over the copies, at least CALLS; the results are those of the last round.
    assert calls == [0, 1, 2] * 7
    times, results = timed["a"]
    assert all(torch.equal(y, right(copy)) for copy, y in enumerate(results))
    assert len(results) == 3
    turns = timing.WARM_UP + timing.REPLAYS
    assert len(driver.replays) == 2 * turns
    assert len(times) == timing.REPLAYS
    first = 2 * timing.WARM_UP + 1
    assert times == pytest.approx([(first + 2 * i) * 1e3 / 21 for i in range(timing.REPLAYS)])


def test_rotated_copies() -> None:
    codes = torch.arange(8.0).view(4, 2).to(torch.float8_e4m3fn)
    for i, copy in enumerate(timing.rotated(codes, 3)):
        assert torch.equal(copy.float(), codes.float().roll(i, 0))
