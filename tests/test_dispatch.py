"""Which route a call takes on which GPU, what can be pinned, and the routes through torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import cute_fp8
from cute_fp8 import dispatch, explain, settings
from cute_fp8.gemms.case import gemm_case
from cute_fp8.gemms.choice import Choice
from cute_fp8.kernels.config import TileConfig
from cute_fp8.kernels.tiles import TILES

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
DTYPES = (BF16, FP16, FP32)
CAPABILITIES = (
    None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (12, 9)
)  # fmt: skip
ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")
TWICE = "activation, gate or residual would be rounded twice"
CPU = torch.device("cpu")


def epilogues(variant: str) -> Iterator[dict[str, Any]]:
    for out_dtype in (*DTYPES, E4M3) if variant == "mxfp8" else DTYPES:
        y_dtype = BF16 if out_dtype is E4M3 else out_dtype
        for bias, residual, activation in product(
            (None, *DTYPES), dict.fromkeys((None, y_dtype, FP32)), ACTIVATIONS
        ):
            yield {
                "out_dtype": out_dtype,
                "bias": bias,
                "residual": residual,
                "activation": activation,
            }


def route_by_design(capability: Any, variant: str, n: int, epilogue: dict[str, Any]) -> str:
    """The table of the design, in words of its own."""
    major, minor = capability or (0, 0)
    if variant == "mxfp8" and major != 12:
        return "torch:mxfp8" if major in (10, 12) and n % 16 == 0 else "reference:gemm"
    if major == 12:
        return "cute:gemm_sm120"
    if (major, minor) == (9, 0):
        return "cute:gemm_sm90"
    if ((major, minor) != (8, 9) and major != 10) or n % 16:
        return "reference:gemm"
    plain = (BF16, None, None)
    if (epilogue["out_dtype"], epilogue["activation"], epilogue["residual"]) == plain:
        return "torch:rowwise" if epilogue["bias"] in (None, BF16) else "torch:tensorwise"
    return "torch:tensorwise"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("variant", ["per_token", "mxfp8"])
def test_every_walk_ends_where_the_design_says(
    capability: Any, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for m, n, epilogue in product((1, 64, 65, 4096), (64, 72), epilogues(variant)):
        if epilogue["out_dtype"] is E4M3 and n % 32:
            continue  # no call at all
        found = explain(
            m=m, n=n, k=64, variant=variant, capability=capability, device=CPU, **epilogue
        )
        assert found.route is not None, str(found)
        expected = route_by_design(capability, variant, n, epilogue)
        assert found.route.entry.name == expected, str(found)
        assert found.route.entry.serves(capability)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("variant", ["per_token", "mxfp8"])
def test_without_cuda_in_torch_a_route_is_left(
    capability: Any, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    for epilogue in epilogues(variant):
        found = explain(
            m=16, n=64, k=64, variant=variant, capability=capability, device=CPU, **epilogue
        )
        assert found.route is not None, str(found)


@pytest.mark.parametrize("backend", settings.BACKENDS)
def test_a_backend_serves_only_its_own(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the sm_120 kernel on 10.x, row-wise torch on 12.x, or the stand-in unasked."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, variant in product(CAPABILITIES, ("per_token", "mxfp8")):
        for epilogue in epilogues(variant):
            route = explain(
                m=16, n=64, k=64, variant=variant, capability=capability, device=CPU,
                backend=backend, **epilogue,
            ).route  # fmt: skip
            if route is None:
                assert backend not in ("auto", "reference")
                continue
            entry = route.entry
            assert backend == entry.backend or (backend == "auto" and entry.backend != "stand-in")
            if entry.kernel == "gemm_sm120":
                assert capability == (9, 0) if backend == "stand-in" else capability[0] == 12
            if entry.kernel == "rowwise":
                assert capability[0] != 12


@pytest.mark.parametrize(
    ("capability", "backend", "target"),
    [
        ((12, 0), "auto", "sm_120a"),
        ((12, 1), "cute", "sm_121a"),
        ((12, 9), "auto", "sm_120f"),
        ((9, 0), "stand-in", "sm_90a"),
    ],
)
def test_targets_and_tiles_of_the_kernel(capability: Any, backend: str, target: str) -> None:
    for m in (1, 64, 65, 4096):
        found = explain(m=m, n=64, k=64, capability=capability, backend=backend)
        assert found.route is not None
        assert found.route.target == target
        assert target in found.route.entry.targets or target == "sm_120f"
        assert found.route.pick is not None
        assert found.route.pick.config.tile in TILES["per_token"]
        assert f"for {target}, config {found.route.pick.name}\n" in str(found)
        for pinned in TILES["per_token"]:
            with cute_fp8.use(config=pinned):
                text = str(explain(m=m, n=64, k=64, capability=capability, backend=backend))
            assert f"for {target}, config {pinned.name}\n          pinned; " in text


def test_torch_routes_have_no_target() -> None:
    route = explain(m=1, n=64, k=64, capability=(8, 9)).route
    assert route is not None and route.target is None


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("backend", settings.BACKENDS)
@pytest.mark.parametrize("variant", ["per_token", "mxfp8"])
def test_the_text_lists_every_refused_entry_with_a_reason(
    capability: Any, backend: str, variant: str
) -> None:
    found = explain(
        m=16, n=72, k=64, variant=variant, capability=capability, device=CPU, backend=backend
    )
    rows = cute_fp8.dispatch_table().rows
    entries = [entry for entry in rows if (entry.op, entry.variant) == ("gemm", variant)]
    head, *lines = str(found).splitlines()
    if found.route is not None and found.route.selection is not None:
        lines = lines[: -len(found.route.selection.lines())]
    where = "no CUDA GPU" if capability is None else "compute capability {}.{}".format(*capability)
    assert head == f"gemm {variant}, M=16 N=72 K=64, out torch.bfloat16, {where}"
    for entry, line in zip(entries, lines[:-1], strict=False):
        name, _, reason = line.removeprefix("  refused ").rpartition(f"{entry.name}: ")
        assert line.startswith("  refused ") and name == "" and len(reason) > 8, line
    if found.route is None:
        assert len(lines) == len(entries) + 1 and lines[-1] == "  no route"
    else:
        assert len(lines) == entries.index(found.route.entry) + 1
        assert lines[-1].startswith(f"  takes   {found.route.entry.name}")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capability": (12, 0)}, None),
        ({"capability": (9, 0)}, "cute:gemm_sm120: compute capability is 9.0, must be 12.x"),
        (
            {"capability": (9, 0), "variant": "mxfp8"},
            "stand-in:gemm_sm120: only on request, use(backend='stand-in')",
        ),
        ({"capability": (8, 6)}, "rowwise: compute capability is 8.6, must be 8.9, 9.0, 10.x"),
        ({"capability": None}, "rowwise: no CUDA GPU, must be of compute capability 8.9, 9.0"),
        ({"out_dtype": FP16}, "torch:rowwise: output is torch.float16, row-wise gives bf16 only"),
        ({"bias": FP32}, "torch:rowwise: bias is torch.float32, row-wise takes bf16 only"),
        ({"residual": BF16}, f"torch:rowwise: {TWICE}"),
        ({"activation": "relu"}, f"torch:rowwise: {TWICE}"),
        ({"n": 72}, "torch:tensorwise: N = 72 is no multiple of 16"),
        ({"variant": "mxfp8", "n": 72}, "torch:mxfp8: N = 72 is no multiple of 16"),
        ({"backend": "reference"}, "torch:rowwise: backend 'reference' was asked for"),
    ],
)  # fmt: skip
def test_reasons(options: dict[str, Any], reason: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    problem = {"m": 16, "n": 64, "k": 64, "capability": (10, 0), "device": CPU, **options}
    text = str(explain("gemm", **problem))
    assert "refused" not in text if reason is None else reason in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"op": "conv"}, f"op: got 'conv', must be one of {', '.join(dispatch.OPS)}"),
        ({"variant": "int8"}, "variant: got 'int8', must be one of per_token, mxfp8"),
        (
            {"backend": "cuda"},
            "backend: got 'cuda', must be one of auto, cute, stand-in, torch, reference",
        ),
    ],
)
def test_what_explain_does_not_know(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        explain(**{"m": 1, "n": 64, "k": 64, **call})
    assert str(caught.value) == message


def test_the_table_prints_every_entry() -> None:
    table = cute_fp8.dispatch_table()
    head, *lines = str(table).splitlines()
    assert head.split() == ["op", "variant", "backend", "kernel", "capabilities", "compiled", "for"]
    assert len(lines) == len(table.rows)
    for entry, line in zip(table.rows, lines, strict=True):
        assert line.split()[:4] == [entry.op, entry.variant, entry.backend, entry.kernel]
        assert all(target in line for target in entry.targets)


# ---------------------------------------------------------------------------- pinning


def test_use_nests_and_leaves_what_is_not_named() -> None:
    before = settings.current()
    small, large = TILES["per_token"][1], TILES["per_token"][0]
    with cute_fp8.use(backend="reference", config=small):
        with cute_fp8.use(config=large.name):
            assert settings.current()[:2] == ("reference", Choice(large))
            with cute_fp8.use(backend="auto"):
                assert settings.current()[:2] == ("auto", Choice(large))
                with settings.unpinned():
                    assert settings.current()[:2] == ("auto", None)
            assert settings.current()[:2] == ("reference", Choice(large))
        assert settings.current()[:2] == ("reference", Choice(small))
    assert settings.current() == before


def test_use_restores_after_an_exception() -> None:
    before = settings.current()
    with pytest.raises(KeyError), cute_fp8.use(backend="reference"):
        raise KeyError
    assert settings.current() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cuda"}, r"backend: got 'cuda', must be one of auto, cute, stand-in, torch, "),
        (
            {"config": "9x9"},
            r"config: got '9x9', must be a TileConfig, a Choice or a name such as ",
        ),
        ({"config": 7}, r"config: got '7', must be a TileConfig, a Choice or a name such as 128x"),
        ({"config": TileConfig(128, 128, 32, 2, 2, 4)}, r"tile .*: k is 32, must be 64 or 128 "),
    ],
)
def test_use_refuses(arguments: dict[str, Any], message: str) -> None:
    before = settings.current()
    with pytest.raises(ValueError, match=message) as caught, cute_fp8.use(**arguments):
        pass
    assert "\n" not in str(caught.value)
    assert settings.current() == before


def test_a_pinned_tile_has_to_suit_the_problem() -> None:
    problem = {"m": 1, "n": 64, "k": 64, "capability": (12, 0)}
    for stages, variant in ((4, "per_token"), (3, "mxfp8")):
        with cute_fp8.use(config=TileConfig(128, 128, 128, 2, 2, stages)):
            found = explain(**problem, variant=variant)
            assert found.route is None and found.refusal is not None
            assert f"s{stages}_w2x2: {variant} needs 1" in found.refusal
            assert explain(**{**problem, "capability": (10, 0)}).route is not None


def test_use_holds_for_its_own_thread_only() -> None:
    inside, done = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        inside.wait(10)
        seen.append(settings.current().backend)
        with cute_fp8.use(backend="torch"):
            done.set()
            seen.append(settings.current().backend)

    thread = threading.Thread(target=other)
    thread.start()
    with cute_fp8.use(backend="reference"):
        inside.set()
        assert done.wait(10)
        thread.join()
        assert settings.current().backend == "reference"
    assert seen == [settings.current().backend, "torch"]


@pytest.mark.parametrize("backend", ["torch", "cute", "stand-in"])
def test_a_pinned_backend_that_cannot_serve_says_why(backend: str) -> None:
    case = gemm_case(4, 64, 64, device="cpu")
    expected = case.run()
    with cute_fp8.use(backend=backend), pytest.raises(RuntimeError) as caught:
        case.run()
    message = str(caught.value)
    assert message.startswith(f"backend: got '{backend}', must be one that serves this call (")
    assert "\n" not in message
    for entry in cute_fp8.dispatch_table().rows:
        if (entry.op, entry.variant, entry.backend) == ("gemm", "per_token", backend):
            assert f"{entry.name}: no CUDA GPU, must be of compute capability" in message
    assert torch.equal(case.run(), expected)
    with cute_fp8.use(backend="reference"):
        assert torch.equal(case.run(), expected)


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_variable_sets_the_backend_of_the_process() -> None:
    code = (
        "import threading, cute_fp8\nfrom cute_fp8 import settings\nseen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(settings.current().backend))\n"
        "thread.start(); thread.join()\n"
        "with cute_fp8.use(backend='auto'): print(seen, settings.current().backend)\n"
        "print(cute_fp8.explain(m=1, n=64, k=64).route)"
    )
    done = python(code, CUTE_FP8_BACKEND="cute")
    assert (done.stdout, done.stderr) == ("['cute'] auto\nNone\n", "")


def test_a_bad_value_of_the_variable_is_an_error_at_import() -> None:
    done = python("import cute_fp8", CUTE_FP8_BACKEND="fast")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ValueError: CUTE_FP8_BACKEND: got 'fast', "
        "must be one of auto, cute, stand-in, torch, reference"
    )
