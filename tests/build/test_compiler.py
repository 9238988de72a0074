"""Compiling without a GPU: what is built, kept and refused, and the gates that code has to pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import cute_fp8
from cute_fp8 import targets
from cute_fp8.build import cache, compiler, shipped
from cute_fp8.evidence import sass
from cute_fp8.evidence.inspection import Inspection, gate_failures, inspect_kernel
from cute_fp8.evidence.sass import Code
from cute_fp8.kernels.config import (
    ACTIVATIONS,
    MX_OUT,
    OUT_DTYPES,
    SMEM_LIMIT_SM120,
    EpilogueConfig,
    GemmConfig,
    TileConfig,
)
from cute_fp8.kernels.tiles import TILES, TILE_64x64, TILE_128x128
from cute_fp8.targets import TARGETS, capability_of_target, check_target, target_of

SMALL = GemmConfig(TILE_64x64, EpilogueConfig())
SMALL_MX = GemmConfig(TILES["mxfp8"][7], EpilogueConfig(), "mxfp8")
#: The epilogue with the most in registers.
LARGE = GemmConfig(TILE_128x128, EpilogueConfig("bfloat16", "bfloat16", "bfloat16", "gelu"))
BLOCK_SCALED = "QMMA.SF.16832.F32.E4M3.E4M3.E8"


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled here comes from no earlier run, and is left to no later one."""
    monkeypatch.setenv(cache.VARIABLE, "off")


# ---------------------------------------------------------------------------- names and targets


def test_every_tile_comes_with_every_epilogue_and_a_name_of_its_own() -> None:
    configs = shipped.shipped_configs()
    assert len({config.name for config in configs}) == len(configs)
    gemms = [config for config in configs if isinstance(config, GemmConfig)]
    for variant, tiles in TILES.items():
        for tile, epilogue in product(tiles, shipped.EPILOGUES):
            assert gemms.count(GemmConfig(tile, epilogue, variant)) == 1
    for config in gemms:
        assert config.check() is config
        assert config.epilogue.out in (*OUT_DTYPES, MX_OUT)
        assert config.epilogue.activation in (None, *ACTIVATIONS)
    splits = [config for config in gemms if config.split_k]
    assert {config.tile for config in splits} == {
        tile for tiles in TILES.values() for tile in tiles if tile.warp_m * tile.warp_n < 64 * 64
    }
    outputs = {config.tile for config in gemms if config.epilogue.mx and not config.epilogue.gated}
    assert outputs == set(TILES["mxfp8"])
    gated = {config.tile for config in gemms if config.epilogue.mx and config.epilogue.gated}
    assert gated == {tile for tile in TILES["mxfp8"] if tile.warp_n == 64}


def test_ops_is_a_glob_over_names() -> None:
    names = [config.name for config in shipped.shipped_configs()]
    for glob in ("*", "*-128x128x128*", "*gelu", "*-float32", names[3]):
        chosen = [config.name for config in shipped.shipped_configs(glob)]
        parts = glob.split("*")
        assert chosen == [n for n in names if n.startswith(parts[0]) and n.endswith(parts[-1])
                          and all(part in n for part in parts)]  # fmt: skip
        assert chosen
    with pytest.raises(
        ValueError, match=r"^ops: got 'gemm', must match a kernel name such as gemm_p"
    ):
        shipped.shipped_configs("gemm")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("sm_120", "arch: got 'sm_120', must be one of {} (did you mean sm_120a?)"),
        ("sm_121", "arch: got 'sm_121', must be one of {} (did you mean sm_121a?)"),
        ("sm_90", "arch: got 'sm_90', must be one of {} (did you mean sm_90a?)"),
        ("sm_100", "arch: got 'sm_100', must be one of {} (did you mean sm_100a?)"),
        ("SM_120A", "arch: got 'SM_120A', must be one of {}"),
        ("", "arch: got '', must be one of {}"),
    ],
)
def test_unknown_archs(arch: str, message: str) -> None:
    expected = message.format(", ".join(TARGETS))
    for call in (cute_fp8.compile, check_target, lambda a: inspect_kernel(SMALL, a)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call(arch)
        assert str(caught.value) == expected


def test_compile_wants_a_gpu_with_kernels() -> None:
    with pytest.raises(ValueError, match=r"^arch: got cpu, must be a GPU of compute capability 12"):
        cute_fp8.compile(torch.device("cpu"))


def test_targets_by_family() -> None:
    """Any 12.x is served, 12.2 and later by the family's target; of the others, what is named."""
    expected = {(12, 0): "sm_120a", (12, 1): "sm_121a", (12, 2): "sm_120f", (12, 9): "sm_120f"}
    expected |= {(9, 0): "sm_90a", (8, 9): "sm_89", (10, 0): "sm_100a"}
    expected |= dict.fromkeys([(8, 0), (9, 1), (10, 3), (11, 0), (13, 0)])
    assert {capability: target_of(capability) for capability in expected} == expected
    named = [(9, 0), (12, 0), (12, 1), (12, 0), (8, 9), (10, 0)]
    assert [capability_of_target(t) for t in TARGETS] == named


# ---------------------------------------------------------------------------- tiles


def test_every_tile_fills_the_smallest_shared_memory() -> None:
    """And one stage more would not fit."""
    assert SMEM_LIMIT_SM120 == 101_376
    for variant, tiles in TILES.items():
        for tile in tiles:
            config = GemmConfig(tile, EpilogueConfig(), variant)
            assert config.check() is config
            # Codes, blocks of scales of 512 bytes, a full and an empty barrier; whose turn it is.
            blocks = -(-tile.m // 128) + -(-tile.n // 128) if variant == "mxfp8" else 0
            stage = (tile.m + tile.n) * tile.k + 512 * blocks + 16
            turns = 16 if tile.pingpong else 0
            assert config.smem_bytes == tile.stages * stage + turns <= SMEM_LIMIT_SM120
            assert (tile.stages + 1) * stage + turns > SMEM_LIMIT_SM120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 32}, "k is 32, must be 64 or 128"),
        ({"k": 256}, "k is 256, must be 64 or 128"),
        ({"m": 48}, "m must be a multiple of warps_m * 16"),
        ({"m": 136}, "m must be a multiple of warps_m * 16"),
        ({"n": 96}, "n must be a multiple of warps_n * 32"),
        ({"m": 256}, "a warp tile of 128x64, must be at most 4096 outputs"),
        ({"m": 512, "warps_m": 8}, "a TMA box side is at most 256"),
        ({"n": 320, "warps_n": 10}, "a TMA box side is at most 256"),
        ({"m": 16, "warps_m": 1, "n": 8, "warps_n": 1}, "n must be a multiple of warps_n * 32"),
        ({"stages": 1}, "stages is 1, must be at least 2"),
        ({"stages": 0}, "stages is 0, must be at least 2"),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if type(value) is dict else "",
)
def test_rules_of_a_tile(change: dict[str, int], message: str) -> None:
    tile = replace(TILE_128x128, **change)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        tile.check()
    assert str(caught.value).startswith(f"tile {tile.name}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "variant", "message"),
    [
        (
            {"stages": 4},
            "per_token",
            "tile {}: per_token needs 131136 bytes of shared memory, m",
        ),
        ({"stages": 3}, "mxfp8", "tile {}: mxfp8 needs 101424 bytes of shared memory, must be at"),
        ({"k": 32}, "mxfp8", "tile {}: k is 32, must be 64 or 128"),
        ({}, "int8", "variant: got 'int8', must be one of per_token, mxfp8"),
    ],
)
def test_rules_of_a_kernel(change: dict[str, int], variant: str, message: str) -> None:
    tile = replace(TILE_128x128, **change)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        GemmConfig(tile, EpilogueConfig(), variant).check()
    assert str(caught.value).startswith(message.format(tile.name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GemmConfig(TileConfig(192, 128, 64, 3, 2, 2), EpilogueConfig()), "6 MMA warps, must be"),
        (GemmConfig(TileConfig(128, 128, 64, 0, 2, 2), EpilogueConfig()), "must be positive"),
        (
            GemmConfig(TileConfig(64, 96, 128, 2, 1, 2), EpilogueConfig(gated=True)),
            "a warp has 96 channels, must have 32 or a multiple of 64 for gated output",
        ),
        (
            GemmConfig(TILES["mxfp8"][0], EpilogueConfig(MX_OUT), "mxfp8", dynamic=True),
            "a dynamic schedule must have no MXFP8 output",
        ),
    ],
)
def test_what_would_run_and_be_wrong(config: GemmConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.check()


def test_the_smallest_tile() -> None:
    """16 rows of 64 codes are one swizzle atom."""
    assert TileConfig(16, 32, 64, warps_m=1, warps_n=1, stages=2).check()


# ---------------------------------------------------------------------------- keeping


@pytest.fixture
def empty_cache() -> None:
    compiler.forget()


@pytest.mark.usefixtures("empty_cache")
def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = compiler.build
    monkeypatch.setattr(compiler, "build", lambda *a, **k: built.append(a) or build(*a, **k))
    report = cute_fp8.compile("sm_120a", ops=SMALL.name)
    assert [line[:2] for line in report] == [(SMALL.name, "sm_120a")]
    first = compiler.get(SMALL, "sm_120a")
    start = time.perf_counter()
    again = cute_fp8.compile("sm_120a", ops=SMALL.name)
    assert time.perf_counter() - start < 0.2
    assert again[0][2] < report[0][2] / 2
    assert first is not None and compiler.get(SMALL, "sm_120a") is first
    assert built == [(SMALL, "sm_120a")]
    cute_fp8.compile("sm_121a", ops=SMALL.name)
    assert built[1:] == [(SMALL, "sm_121a")]
    assert compiler.get(SMALL, "sm_121a") is not first
    assert str(report) == f"sm_120a  {report[0][2]:6.2f} s  {SMALL.name}"


@pytest.mark.usefixtures("empty_cache")
def test_threads_that_want_the_same_kernel_share_one_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Compiled:
        def __tvm_ffi_object__(self) -> object:
            return self

    built: list[Compiled] = []

    def build(config: GemmConfig, target: str) -> Compiled:
        time.sleep(0.05)
        built.append(Compiled())
        return built[-1]

    monkeypatch.setattr(compiler, "build", build)
    got: list[object] = []
    threads = [
        threading.Thread(target=lambda: got.append(compiler.get(SMALL, "sm_120a")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compiler.forget()
    assert len(built) == 1 and got == built * 8


# ---------------------------------------------------------------------------- what goes wrong


def test_a_target_that_the_dsl_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain sm_120 has no block-scaled MMA: should it ever get past the check."""
    monkeypatch.setattr(targets, "TARGETS", (*TARGETS, "sm_120"))
    with pytest.raises(RuntimeError) as caught:
        compiler.build(SMALL, "sm_120")
    message = str(caught.value)
    assert message.startswith(
        f"compile: got {SMALL.name} for sm_120, must be a kernel and a target"
    )
    assert message.isprintable(), "one line, no control codes"
    assert caught.value.__cause__ is not None
    monkeypatch.undo()
    assert compiler.build(SMALL, "sm_120a") is not None, "the DSL's state is not spoilt"


def test_a_missing_dsl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    compiler.forget()
    with pytest.raises(RuntimeError) as caught:
        cute_fp8.compile("sm_120a", ops=SMALL.name)
    message = str(caught.value)
    assert message.startswith("nvidia-cutlass-dsl: got an import error (")
    assert message.endswith("must be installed: pip install 'nvidia-cutlass-dsl>=4.8,<4.9'")
    assert "\n" not in message


def test_the_given_target_counts_not_the_machine(tmp_path: Path) -> None:
    """No GPU, and the DSL's own variable names another architecture."""
    code = (
        "import sys; from cute_fp8.build import compiler, shipped\n"
        "(config,) = shipped.shipped_configs(sys.argv[1])\n"
        "compiler.build(config, 'sm_121a', options='--keep-cubin --dump-dir ' + sys.argv[2])"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, "-c", code, SMALL.name, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    (cubin,) = tmp_path.rglob("*.cubin")
    disassemble = [sass.find_tool("nvdisasm"), "-c", str(cubin)]
    listing = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout
    assert ".target\tsm_121a" in listing
    assert sass.read_cubin(cubin).mma == (BLOCK_SCALED,)


# ---------------------------------------------------------------------------- gates


def check_native(found: Inspection, config: GemmConfig, target: str) -> None:
    assert found.failures == ()
    assert (found.kernel, found.target) == (config.name, target)
    assert found.smem_bytes == config.smem_bytes <= SMEM_LIMIT_SM120
    code = found.code
    assert code.mma == (BLOCK_SCALED,)
    stages = config.tile.mmas_per_k_tile * config.k_granule
    assert code.loop_mma == stages, "the main loop is a stage, or those that share scales"
    assert code.stack == code.local == code.spills == 0
    assert code.tma_loads == (4 if config.variant == "mxfp8" else 2), "codes, and their scales"
    assert code.registers * config.tile.threads <= 65_536
    data = json.loads(json.dumps(found.as_dict()))
    assert data["code"]["mma"] == [BLOCK_SCALED] and data["failures"] == []
    assert data["code"]["others_per_mma"] == round(code.others_per_mma, 4)


@pytest.mark.parametrize("target", ["sm_120a", "sm_121a", "sm_120f"])
def test_the_small_tile_passes_the_gates(target: str) -> None:
    check_native(inspect_kernel(SMALL, target), SMALL, target)


def test_the_small_mxfp8_tile_passes_the_gates() -> None:
    check_native(inspect_kernel(SMALL_MX, "sm_120a"), SMALL_MX, "sm_120a")


def test_the_large_tile_passes_the_gates() -> None:
    found = inspect_kernel(LARGE, "sm_120a")
    check_native(found, LARGE, "sm_120a")
    assert found.code.others_per_mma < 0.5, "64x64 warp tiles leave little else to do"


def test_the_stand_in_is_no_native_kernel() -> None:
    """Negative control: real code of another MMA, which the gates of its own target let pass."""
    found = inspect_kernel(SMALL, "sm_90a")
    assert found.failures == ()
    assert found.code.mma and not any(name.startswith("QMMA.SF") for name in found.code.mma)
    failures = gate_failures(found.code, found.smem_bytes, "sm_120a")
    assert failures == tuple(f"uses {name}, not the block-scaled MMA" for name in found.code.mma)


GOOD = Code((BLOCK_SCALED,), 128, 0, 0, 0, tma_loads=2, loop_mma=64, loop_others=32)
PLAIN = "QMMA.16832.F32.E4M3.E4M3"


@pytest.mark.parametrize(
    ("change", "smem", "failure"),
    [
        ({"mma": ()}, 0, "no tensor-core instruction"),
        ({"mma": (PLAIN,)}, 0, f"uses {PLAIN}, not the block-scaled MMA"),
        ({"mma": (PLAIN, BLOCK_SCALED)}, 0, f"uses {PLAIN}, not the block-scaled MMA"),
        ({"mma": ("HMMA.16816.F32",)}, 0, "uses HMMA.16816.F32, not the block-scaled MMA"),
        ({"tma_loads": 0}, 0, "no TMA load"),
        ({"stack": 16}, 0, "0 B local, 16 B stack, 0 spills"),
        ({"local": 8}, 0, "8 B local, 0 B stack, 0 spills"),
        ({"spills": 3}, 0, "0 B local, 0 B stack, 3 spills"),
        ({}, 101_377, "101377 B shared memory, limit 101376"),
    ],
)
def test_each_gate_fails_alone(change: dict[str, object], smem: int, failure: str) -> None:
    for target in ("sm_120a", "sm_121a", "sm_120f"):
        assert gate_failures(GOOD, 101_376, target) == ()
        assert gate_failures(replace(GOOD, **change), smem, target) == (failure,)


def test_all_failed_gates_are_reported() -> None:
    code = replace(GOOD, mma=(PLAIN, "HMMA.16816.F32"), tma_loads=0, stack=8)
    assert len(gate_failures(code, 200_000, "sm_120a")) == 5
    assert gate_failures(replace(GOOD, mma=(PLAIN,)), 232_448, "sm_90a") == ()
    assert gate_failures(GOOD, 232_449, "sm_90a") == ("232449 B shared memory, limit 232448",)
