"""The harness on the CPU: everything but the clock is real in its dry run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("jsonschema")
pytest.importorskip("matplotlib")
from cute_fp8 import timing  # noqa: E402
from cute_fp8.build import kernel_sources  # noqa: E402
from perf import compare, gemm_problem, measure, plot, quack_peer, report, shapes, sweep  # noqa: E402
from perf.operands import Operands  # noqa: E402
from perf.results_io import Partial, load, save, schema_errors  # noqa: E402

Row = dict[str, Any]
Outcome = tuple[int, dict[str, Any]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks in a folder of each test's own."""
    monkeypatch.setenv("CUTE_FP8_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def dry(out: Path, *arguments: str) -> int:
    return sweep.main(["--dry-run", "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_FP8_CACHE_DIR", str(folder / "cache"))
        code = dry(
            folder / "a.json", "--plot", "--eager", "--epilogues", "none", "bias+silu+residual"
        )
    assert code == 0
    assert not list(folder.glob("*.partial.jsonl"))
    assert len(list(folder.glob("a-*.png"))) == 3
    return load(folder / "a.json")


def test_a_dry_run_says_so_and_keeps_to_the_schema(result: dict[str, Any]) -> None:
    assert schema_errors(result) == []
    assert result["meta"]["gpu"] == "dry run"
    assert set(result["meta"]["first_calls"]) >= {"cute_fp8", "torch_bf16"}
    assert result["meta"]["kernels"] == kernel_sources.as_line()
    found = report.by_shape(result["rows"])
    assert len(found) == 4 * 2 * 2
    for (_, variant, *_), rows in found.items():
        fast = ["cute_fp8_fast"] if variant == "per_token" else []
        assert {"cute_fp8", *fast, "torch_bf16"} < set(rows)
        for impl in ("cute_fp8", *fast, "torch_bf16"):
            # A bf16 output's rounding, of each step of a peer's epilogue.
            assert 0 < rows[impl]["error"] < 0.004 and rows[impl]["host_us"] > 0
        assert rows["cute_fp8"]["route"] == "reference:gemm"
        parts = rows["cute_fp8"]["host_parts"]
        assert sum(parts.values()) == pytest.approx(rows["cute_fp8"]["host_us"], abs=0.01)
    # What the CPU has none of says so in its row.
    failed = [row for row in result["rows"] if row["impl"] == "torch_mxfp8"]
    assert len(failed) == 8 and all(row["failed"] for row in failed)


@pytest.mark.parametrize("variant", ["per_token", "mxfp8"])
def test_the_set_up_is_the_correctness_tests(variant: str) -> None:
    case = gemm_problem.make_case(variant, 33, 24, 64, "bias+gelu+residual", "cpu")
    case.check(case.run())
    weight = gemm_problem.Weight(variant, "bias", (300, 24, 64), "cpu", 5000)
    for c in weight.contenders(290, gemm_problem.Wanted(["auto"])):
        if c.impl in ("cute_fp8", "torch_bf16"):
            assert c.rows is not None and len(c.rows) == 256
            assert {0, 289} < set(c.rows.tolist())
            assert all(c.error(c.call(i), i) < 0.003 for i in range(c.copies))
            y = c.call(0)
            assert c.error(y[:-1]) == float("inf") and c.error(y * 1.2) == float("inf")


def test_a_wrong_result_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = gemm_problem.cute_fp8.gemm
    monkeypatch.setattr(gemm_problem.cute_fp8, "gemm", lambda *a, **k: gemm(*a, **k) * 1.05)
    assert dry(tmp_path / "a.json", "--impls", "cute_fp8", "torch_bf16") == 1
    rows = load(tmp_path / "a.json")["rows"]
    assert all("failed" in row for row in rows if row["impl"] == "cute_fp8")
    assert all("us" in row for row in rows if row["impl"] == "torch_bf16")


def test_a_peer_that_tunes_too_long_is_left_out(tmp_path: Path) -> None:
    assert dry(tmp_path / "a.json", "--variants", "per_token", "--peer-seconds", "0") == 0
    rows = [r for r in load(tmp_path / "a.json")["rows"] if r["impl"] == "torch_bf16"]
    assert "us" in rows[0] and all("left out" in row["failed"] for row in rows[1:])


def test_a_killed_sweep_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    command = [sys.executable, "-m", "perf.sweep", "--dry-run", "--out", str(out)]
    command += ["--impls", "cute_fp8", "-M", "1-4000:1", "-N", "32", "-K", "64"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    partial = tmp_path / "a.partial.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        if partial.exists() and partial.read_text().count("\n") > 3:
            break
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not out.exists()
    with partial.open("a") as file:
        file.write('{"op": "gemm", "vari')
    before = Partial(out)
    assert before.warning is not None and len(before.rows) >= 3
    had = [row["M"] for row in before.rows.values()]
    with partial.open("a") as file:
        file.write('{"op": "gemm", "vari')
    sizes = ",".join(str(m) for m in [*had, 4001, 4002])
    arguments = ("--impls", "cute_fp8", "--variants", "per_token", "-M", sizes, "-N32", "-K64")
    assert dry(out, *arguments) == 0
    error = capsys.readouterr().err
    assert "half-written end" in error and f"going on from {partial}: {len(had)} rows" in error
    assert error.count("per_token none") == 2
    assert [row["M"] for row in load(out)["rows"]] == [*had, 4001, 4002]
    assert not partial.exists()


def test_a_sweep_of_other_code_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    meta = {"gpu": "another"}
    Partial(out).begin(meta)
    assert dry(out) == 2
    error = capsys.readouterr().err
    assert "gpu was another, is dry run" in error and error.count("\n") == 1
    assert dry(out, "--fresh", "--impls", "torch_bf16") == 0


def test_a_budget_drops_shapes_with_a_note(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    arguments = ("--impls", "torch_bf16", "--variants", "per_token")
    assert dry(out, *arguments, "--budget", "0") == 1  # nothing was measured
    assert dry(out, *arguments) == 0
    assert len(load(out)["rows"]) == 4


def test_one_sweep_at_a_time(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir()
    lock = cache / "perf-dry-run.lock"
    with FileLock(lock):
        assert dry(tmp_path / "a.json") == 2
    error = capsys.readouterr().err
    assert str(lock) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lama8b"], "set: got 'lama8b', must be one of locdit, llama8b"),
        ([], "got no whole shape"),
        (["-M", "16"], "got no whole shape"),
        (["-M", "16-1", "-N", "8", "-K", "16"], "-M: got '16-1', must be like"),
        (["-M", "0", "-N", "8", "-K", "16"], "-M: got '0'"),
        (["-M", "1", "-N", "9", "-K", "16"], "got N=9, K=16, must be multiples"),
        (["square", "--epilogues", "relu+silu"], "epilogue: got 'relu+silu'"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main(["square"]) == 2
    error = capsys.readouterr().err
    assert "got no CUDA GPU" in error and error.count("\n") == 1


def test_shapes() -> None:
    sizes = {name: len(found) for name, found in shapes.SETS.items()}
    assert sizes == {
        "locdit": 4,
        "llama8b": 40,
        "qwen27b": 40,
        "square": 2,
        "host": 2,
        "decode": 56,
    }
    found = shapes.shapes_of(["llama8b", "locdit", "square"], None, None, None)
    assert len(found) == 45  # 4096 cubed is of two sets
    weights = [shape[1:] for shape in found]
    assert sum(a != b for a, b in pairwise(weights)) + 1 == len({*weights})
    assert shapes.numbers("1,16-64:16,1-8*2") == [1, 16, 32, 48, 64, 1, 2, 4, 8]
    assert shapes.shapes_of(["square"], "7", None, None) == [(7, 4096, 4096), (7, 8192, 8192)]


class Clock:
    """CUDA graphs and events that take no time, but for a call: 100 us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.replays = 0.0, 0
        for name in ("CUDAGraph", "Event", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def synchronize(self) -> None:
        pass

    def graph(self, graph: Any) -> AbstractContextManager[Any]:
        graph.start = self.now
        return closing(SimpleNamespace(close=lambda: setattr(graph, "us", self.now - graph.start)))

    def CUDAGraph(self) -> Any:  # noqa: N802
        graph = SimpleNamespace()

        def replay() -> None:
            self.now += graph.us
            self.replays += 1

        graph.replay = replay
        return graph

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e-3
        return event


@pytest.mark.parametrize(
    ("copies", "us", "calls"), [(2, 100, 20), (2, 5000, 2), (2, 1, 40), (30, 1, 30), (72, 1, 72)]
)
def test_a_replay_lasts_a_few_milliseconds(
    copies: int, us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    made = []

    def call(i: int) -> torch.Tensor:
        clock.now += us
        made.append(i)
        return torch.ones(2, 2)

    contender = timing.Contender("x", call, copies, torch.ones(2, 2).double())
    ((times, results),) = measure.paced_times([contender]).values()
    # A round to learn how long it lasts, and whole rounds in the graph.
    assert made == list(range(copies)) * (1 + calls // copies)
    assert times == pytest.approx([us] * 15) and len(results) == copies
    assert clock.replays == 17


def test_quacks_configurations_are_timed_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean over all copies, in few calls; a kernel still compiled is QuACK's to wait for."""
    clock = Clock(monkeypatch)
    made: list[tuple[int, int, str]] = []

    def fn(a: int, b: int, config: str) -> None:
        if config == "pending":
            raise TimeoutError
        clock.now += a + b
        made.append((a, b, config))

    sets = [(100,), (200,), (300,)], [{"b": 0}, {"b": 10}, {"b": 20}]
    times = quack_peer.brief_times(fn, *sets, {"config": "c"}, quantiles=(0.5, 0.2, 0.8))
    assert times == pytest.approx([0.21] * 3)  # ms
    assert len(made) == 1 + 3 + 2 * 3 and clock.replays == 2
    with pytest.raises(TimeoutError):
        quack_peer.brief_times(fn, *sets, {"config": "pending"})


def test_quacks_tuner_is_set_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    interface = SimpleNamespace(
        gemm=lambda *a, **k: calls.append(k) or a[0], gemm_tuned=SimpleNamespace(cache_results=True)
    )
    tuner = SimpleNamespace(_bench_cuda_graph_l2_rotate=None)
    quack = SimpleNamespace(autotuner=tuner, gemm_interface=interface)
    monkeypatch.setitem(sys.modules, "quack", quack)
    monkeypatch.setenv("QUACK_COMPILE_WORKERS", "3")
    quack_peer._gemm.cache_clear()
    case = gemm_problem.make_case("per_token", 16, 32, 64, "none", "cpu")
    one = torch.tensor(0.5)
    operands = Operands(case.xq, case.sx, [case.wq], [case.sw], [None], [None], None, one, one)
    call = quack_peer.quack(operands)
    assert call(0, None) is case.xq and call(0, None) is case.xq
    assert [(k["tuned"], k["alpha"]) for k in calls] == [(True, 0.25)] * 2
    assert tuner._bench_cuda_graph_l2_rotate is quack_peer.brief_times
    assert interface.gemm_tuned.cache_results is False
    assert os.environ["QUACK_COMPILE_WORKERS"] == "3"
    quack_peer._gemm.cache_clear()


def test_the_backends_of_a_cpu() -> None:
    assert measure.ours("cpu", "per_token", True) == ["auto"]


# --------------------------------------------------------------------------------- result files


def synthetic(factor: Callable[[Row], float] = lambda row: 1.0) -> tuple[Row, list[Row]]:
    """Like an H200's; ``factor`` changes times."""
    meta: Row = dict.fromkeys(("driver", "torch", "dsl", "cute_fp8", "commit"), "1")
    meta |= {"gpu": "NVIDIA H200", "date": "2026-11-30", "read_gbps": 4280.0}
    meta |= {"copy_gbps": 4000.0, "matmul_tflops": 790.0, "fp8_tflops": 1450.0}
    rows = []
    for m, n, k in [*shapes.SETS["llama8b"], *shapes.SETS["locdit"]]:
        for i, impl in enumerate(("cute_fp8", "torch_bf16", "torch_rowwise", "quack")):
            row: Row = {"op": "gemm", "variant": "per_token", "impl": impl, "epilogue": "none"}
            row |= {"M": m, "N": n, "K": k}
            us = (3 + 2e-9 * m * n * k / 1.2 + n * k / 4e6) * (0.7 + 0.2 * i) * factor(row)
            row |= {"us": us, "us_min": us, "us_max": us, "error": 0.0017}
            row |= {
                "tflops": 2e-6 * m * n * k / us,
                "gbps": 1e-3 * (m * k + n * k + 2 * m * n) / us,
            }
            rows.append(row)
    return meta, rows


def written(path: Path, factor: Callable[[Row], float] = lambda row: 1.0) -> str:
    save(path, *synthetic(factor))
    return str(path)


def test_plots(tmp_path: Path) -> None:
    assert plot.main([written(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 0
    pictures = sorted((tmp_path / "out").iterdir())
    assert [p.name for p in pictures] == ["a-roofline.png", "a-speedup.png", "a-tflops.png"]
    for picture in pictures:
        assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(impl: str, by: float) -> Callable[[Row], float]:
        return lambda row: by if row["impl"] == impl and row["M"] == 64 else 1.0

    a = written(tmp_path / "a.json")
    b = written(tmp_path / "b.json", slow("cute_fp8", 1.08))
    peer = written(tmp_path / "c.json", slow("quack", 1.5))
    machine = written(tmp_path / "d.json", lambda row: 1.2)
    assert compare.main([a, a]) == 0
    assert compare.main([a, b]) == 1
    assert "4 past the threshold of 5 %" in capsys.readouterr().out
    assert compare.main([a, b, "--threshold", "10"]) == 0
    assert compare.main([b, a]) == 0
    assert compare.main([a, peer]) == 0
    assert compare.main([a, peer, "--all"]) == 1
    assert compare.main([a, machine]) == 1
    assert compare.main([a, machine, "--relative-to", "torch_rowwise"]) == 0


def test_compare_one_that_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a.json")
    meta, rows = synthetic()
    rows[0] = {key: value for key, value in rows[0].items() if key in "op variant impl M N K"}
    rows[0] |= {"variant": "per_token", "epilogue": "none", "failed": "wrong"}
    save(tmp_path / "b.json", meta, rows)
    assert compare.main([a, str(tmp_path / "b.json")]) == 1
    assert "no longer timed: wrong" in capsys.readouterr().out


def test_a_half_written_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(written(tmp_path / "a.json"))
    path.write_text(path.read_text()[:2000])
    for run in (lambda: compare.main([str(path), str(path)]), lambda: plot.main([str(path)])):
        assert run() == 2
        error = capsys.readouterr().err
        assert f"{path}: half-written" in error and error.count("\n") == 1
    path.write_text('{"meta": {}, "rows": []}')
    assert plot.main([str(path)]) == 2
    assert plot.main([str(tmp_path / "none.json")]) == 2


def test_the_schema_refuses(tmp_path: Path) -> None:
    meta, rows = synthetic()
    for change in ({"us": -1.0}, {"impl": "mine"}, {"failed": "and timed"}, {"M": 0}):
        assert schema_errors({"meta": meta, "rows": [{**rows[0], **change}]})
    with pytest.raises(ValueError, match="against the schema"):
        save(tmp_path / "a.json", meta, [{**rows[0], "us": 0}])
    assert not list(tmp_path.iterdir())


def test_losses_stay_in_the_tables() -> None:
    _, rows = synthetic(lambda row: 9.0 if row["impl"] == "cute_fp8" else 1.0)
    table = report.speedup_table(rows)
    assert table is not None
    assert list(table.columns[-1].cells) == ["44", "44", "44"]
