"""Autotuning, with a clock of ours: what is timed, what is kept, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import cli, dispatch, gpus, settings, timing
from cute_fp8.build import cache
from cute_fp8.gemms import plan, selection, tuning, winners
from cute_fp8.gemms.choice import parse
from cute_fp8.gemms.tuning import autotune
from cute_fp8.kernels.tiles import TILES
from cute_fp8.timing import Contender

SHAPE = (33, 64, 96)
Times = dict[str, tuple[list[float], list[Tensor]]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An RTX 5090, as far as selection looks; what is pinned computes on the CPU all the same."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "ROTATED_BYTES", 3 * 64 * 96)
    explain = tuning.explain

    def explain_as_if(*arguments: Any, **options: Any) -> Any:
        options["backend"] = None if options["backend"] == "reference" else options["backend"]
        return explain(*arguments, **options, gpu="RTX 5090")

    monkeypatch.setattr(tuning, "explain", explain_as_if)
    pinned = tuning._pinned
    monkeypatch.setattr(tuning, "_pinned", lambda _, *rest: pinned("reference", *rest))
    monkeypatch.setattr(
        tuning.compiler, "fill_disk", lambda configs, target: [0.0 for _ in configs]
    )
    winners.forget()
    yield tmp_path / "cache"
    winners.forget()


class Clock:
    """Says that the n-th candidate took so long, having run each with every copy."""

    def __init__(self, *us: float):
        self.us = us
        self.seen: list[list[Contender]] = []

    def __call__(self, found: Sequence[Contender]) -> Times:
        self.seen.append(list(found))
        return {
            c.impl: ([self.us[i % len(self.us)]] * 3, [c.call(copy) for copy in range(c.copies)])
            for i, c in enumerate(found)
        }


def reason(shape: tuple[int, int, int] = SHAPE, **options: Any) -> tuple[str, str]:
    m, n, k = shape
    route = cute_fp8.explain(m=m, n=n, k=k, gpu="RTX 5090", **options).route
    assert route is not None and route.selection is not None and route.pick is not None
    return route.selection.reason, route.pick.name


def test_the_best_few_are_timed_and_the_fastest_kept(here: Path) -> None:
    clock = Clock(9.0, 8.0, 5.0, 7.0)
    ranking = selection.rank(cute_fp8.explain(m=33, n=64, k=96).problem, gpus.RTX_5090)
    report = autotune(SHAPE, best=4, timer=clock)
    assert [line.config for line in report] == [ranked.pick.name for ranked in ranking[:4]]
    assert [line.us for line in report] == [9.0, 8.0, 5.0, 7.0]
    assert [line.kept for line in report] == [False, False, True, False]
    assert [line.predicted_us for line in report] == [
        round(ranked.prediction.us, 1) for ranked in ranking[:4]
    ]
    assert reason() == ("tuned", ranking[2].pick.name)
    assert reason((34, 64, 96)) == ("predicted", reason((34, 64, 96))[1])
    winners.forget()  # as the next process
    assert reason() == ("tuned", ranking[2].pick.name)
    text = str(report).splitlines()
    assert len(text) == 4 and text[2].endswith("kept") and "measured      5.0 us" in text[2]
    assert (here / winners.FILE).exists()


@pytest.mark.parametrize("variant", TILES)
def test_every_candidate_multiplies_the_same_rotated_weights(variant: str) -> None:
    clock = Clock(2.0, 1.0)
    options = {"bias": torch.bfloat16, "residual": torch.float32, "activation": "gelu"}
    report = autotune(SHAPE, variant=variant, best=3, timer=clock, **options)
    assert [line.failed for line in report] == [None] * 3
    (found,) = clock.seen
    assert {c.copies for c in found} == {3}
    first, second = (found[0].call(copy) for copy in (0, 1))
    # Output channels moved on by one: another weight, bias and residual, to the last element.
    assert torch.equal(first.roll(1, 1), second) and not torch.equal(first, second)
    assert reason(variant=variant, **options)[0] == "tuned"
    assert reason(variant=variant)[0] == "predicted"


def test_each_candidate_runs_with_its_own_configuration_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, None] = {}
    run = tuning.GemmCase.run

    def note(case: Any) -> Tensor:
        choice = settings.current().choice
        assert choice is not None
        seen[choice.name] = None
        return run(case)

    monkeypatch.setattr(tuning.GemmCase, "run", note)
    with cute_fp8.use(config="32x64x128_s8_w2x2/split7"):  # which is not what is tuned
        report = autotune(SHAPE, best=3, timer=Clock(1.0))
    assert [*seen] == [line.config for line in report] and len(report) == 3


def test_a_candidate_that_is_wrong_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = tuning._pinned
    made: list[Callable[[int], Tensor]] = []

    def spoil_the_first(*arguments: Any) -> Callable[[int], Tensor]:
        call = pinned(*arguments)
        made.append(call)
        return (lambda i: call(i) * 1.05) if len(made) == 1 else call

    monkeypatch.setattr(tuning, "_pinned", spoil_the_first)
    report = autotune(SHAPE, best=2, timer=Clock(1.0))
    assert report[0].failed is not None and report[0].failed.startswith("wrong: ")
    assert (report[0].us, report[0].kept, report[1].kept) == (None, False, True)
    assert "wrong: " in str(report) and reason() == ("tuned", report[1].config)


def test_nothing_is_kept_if_nothing_works(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    def refuse(i: int) -> Tensor:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(tuning, "_pinned", lambda *arguments: refuse)
    with pytest.raises(RuntimeError, match="got no candidate that works") as caught:
        autotune(SHAPE, best=2, timer=Clock(1.0))
    assert "RuntimeError: no kernel" in str(caught.value) and "\n" not in str(caught.value)
    assert reason()[0] == "predicted" and not (here / winners.FILE).exists()


def test_of_equally_fast_ones_the_models_first_is_kept() -> None:
    report = autotune(SHAPE, best=3, timer=Clock(4.0))
    assert [line.kept for line in report] == [True, False, False]


def test_several_shapes_each_once_under_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    def bar(steps: Iterator[Any], what: str, total: int) -> list[Any]:
        done = list(steps)
        bars.append((what, total, len(done)))
        return done

    monkeypatch.setattr(tuning, "watched", bar)
    report = autotune([SHAPE, (16, 64, 96), SHAPE], best=2, timer=Clock(2.0, 1.0))
    assert [(line.m, line.kept) for line in report] == [
        (33, False), (33, True), (16, False), (16, True)
    ]  # fmt: skip
    ((what, total, steps),) = bars
    assert (what, total) == ("tuning", steps) and 4 + 2 <= total <= 4 + 4


def test_all_kernels_are_compiled_ahead_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[Any], str]] = []

    def fill(configs: list[Any], target: str) -> Iterator[float]:
        asked.append((configs, target))
        yield 0.0
        raise RuntimeError("one does not compile")

    monkeypatch.setattr(tuning.compiler, "fill_disk", fill)
    report = autotune([SHAPE, (16, 64, 96)], best=3, timer=Clock(1.0))
    ((configs, target),) = asked
    assert target == "sm_120a" and len(configs) == len({*configs})
    tiles = {parse(line.config).tile for line in report}
    assert {config.tile for config in configs} == tiles and len(report) == 6


def test_plans_are_made_anew_after_tuning() -> None:
    case = tuning.quantized_case("per_token", 4, 64, 64, device="cpu")
    case.run()
    assert plan._plans
    autotune(SHAPE, best=1, timer=lambda found: Clock(1.0)(found))
    assert not plan._plans


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": (1, 2)}, r"shapes: got 1, must be \(M, N, K\), all positive"),
        ({"shapes": [(1, 64, 0)]}, r"shapes: got \(1, 64, 0\), must be "),
        ({"shapes": SHAPE, "best": 0}, "best: got 0, must be at least 1"),
        ({"shapes": SHAPE, "variant": "int8"}, "variant: got 'int8', must be one of"),
        ({"shapes": (4, 64, 8)}, "xq: got K = 8, must be a positive multiple of 16"),
        (
            {"shapes": SHAPE, "variant": "mxfp8", "out_dtype": torch.float8_e4m3fn},
            "out_dtype: got torch.float8_e4m3fn, must be torch.bfloat16, ",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        autotune(**arguments, timer=Clock(1.0))
    assert "\n" not in str(caught.value)
    assert autotune(SHAPE, best=1, timer=Clock(1.0))[0].kept


def test_a_machine_without_such_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "explain", dispatch.explain)
    with pytest.raises(ValueError, match=r"got 33x64x96 on cpu \(reference:gemm\), must be a GPU"):
        autotune(SHAPE, timer=Clock(1.0))


def test_refused_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="got a call inside a CUDA graph capture, must be "):
        autotune(SHAPE, timer=Clock(1.0))


def test_refused_inside_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises(RuntimeError, match="inside a trace, must be called be"):
        autotune(SHAPE, timer=Clock(1.0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="autotune: got a call inside a trace"):
        autotune(SHAPE, timer=Clock(1.0))


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tuning, "graph_times", lambda found, replay_us: Clock(2.0, 1.0)(found))
    assert cli.main(["autotune", "33", "64", "96", "--best", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].endswith("kept")
    monkeypatch.setattr(tuning, "explain", dispatch.explain)
    assert cli.main(["autotune", "33", "64", "96"]) == 2
    assert capsys.readouterr().err.startswith("cute_fp8 autotune: autotune: got 33x64x96 on cpu")


@pytest.mark.gpu
def test_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    report = autotune((16, 512, 1024), best=3)
    assert all(line.us is not None and line.failed is None for line in report)
    assert sum(line.kept for line in report) == 1
