"""Projections of few tokens on the CPU: the op, which serves tracing, is the function; routes."""

from __future__ import annotations

import pytest
import torch

import cute_fp8
from cute_fp8.decoder import projection
from cute_fp8.decoder.case import DecoderCase, decoder_case
from cute_fp8.decoder.weights import DecoderConfig
from cute_fp8.gemms.ops import as_bytes
from cute_fp8.kernels.projection_config import (
    MAX_K,
    ROWS,
    WARP_BLOCKS,
    ProjectionConfig,
    projection_config,
    room_for,
    shipped_projections,
)
from cute_fp8.workspace import is_unshared

SM90, SM120 = 232_448, 101_376


@pytest.fixture(scope="module")
def case() -> DecoderCase:
    return decoder_case(DecoderConfig(128, 256, 4, 2, 32), biases=True)


@pytest.mark.parametrize("norm", [True, False])
def test_the_op_is_the_function(case: DecoderCase, norm: bool) -> None:
    x, w = case.x(1, 5)[0], case.weights.qkv if norm else case.weights.o
    weight = case.weights.input_norm if norm else None
    residual = None if norm else case.x(1, 5, seed=2)[0]
    operands = (x, weight, as_bytes(w.codes), w.scales, w.bias, residual, 1e-5)
    y, codes, scales = torch.ops.cute_fp8.projection(*operands)
    wanted = projection._project(x, weight, 1e-5, w, residual, "per_token")
    assert torch.equal(y, wanted.y) and torch.equal(scales, wanted.scales)
    assert torch.equal(codes, as_bytes(wanted.codes))
    torch.library.opcheck(torch.ops.cute_fp8.projection, operands)


def test_the_op_keeps_nothing(case: DecoderCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts it is a GEMM, which else keeps memory that may be a graph's."""
    seen = []

    def gemm(*arguments: object, **options: object) -> torch.Tensor:
        seen.append(is_unshared())
        return cute_fp8.gemm(*arguments, **options)

    monkeypatch.setattr(projection, "gemm", gemm)
    x, w = case.x(1, 5)[0], case.weights.qkv
    operands = (x, case.weights.input_norm, as_bytes(w.codes), w.scales, w.bias, None, 1e-5)
    torch.ops.cute_fp8.projection(*operands)
    assert seen == [True] and not is_unshared()


@pytest.mark.parametrize(
    ("capability", "m", "k", "taken"),
    [
        ((12, 0), 1, 4096, "cute:projection"),
        ((12, 1), 16, 4096, "cute:projection"),
        ((12, 0), 17, 4096, "reference:separate_launches"),
        ((12, 0), 8, 8192, "cute:projection"),
        ((12, 0), 16, 8192, "reference:separate_launches"),
        ((12, 0), 1, MAX_K + 16, "reference:separate_launches"),
        ((9, 0), 1, 4096, "reference:separate_launches"),
        ((8, 9), 1, 4096, "reference:separate_launches"),
        (None, 1, 4096, "reference:separate_launches"),
    ],
)
def test_routes(capability: tuple[int, int] | None, m: int, k: int, taken: str) -> None:
    options = {"capability": capability, "device": "cpu"}
    found = cute_fp8.explain("projection", m=m, n=6144, k=k, **options)
    assert found.route is not None and found.route.entry.name == taken
    if found.route.block is not None:
        assert isinstance(found.route.block, ProjectionConfig) and found.route.block.rows >= m


@pytest.mark.parametrize("m", [4, 5])
def test_on_hopper_few_tokens_and_small_weights(m: int) -> None:
    options = {"capability": (9, 0), "device": "cpu"}
    found = cute_fp8.explain("projection", m=m, n=2560, k=1024, **options)
    assert found.route is not None and (found.route.entry.backend == "cute") is (m == 4)
    assert m == 4 or "M * K = 5 * 1024, must be at most 4194304 and 4096" in str(found)


def test_what_explain_refuses() -> None:
    for sizes in ({"m": 1, "k": 64}, {"m": 1, "n": 36, "k": 64}, {"m": 0, "n": 64, "k": 64}):
        with pytest.raises(ValueError, match=r"m, n, k: got .*, must be sizes, n a multiple of 8"):
            cute_fp8.explain("projection", **sizes)


@pytest.mark.parametrize("smem", [SM90, SM120])
@pytest.mark.parametrize("sms", [36, 48, 70, 132, 170, 188])
@pytest.mark.parametrize("norm", ["bfloat16", "float32", None])
def test_every_gpu_has_a_configuration(sms: int, smem: int, norm: str | None) -> None:
    for m in ROWS:
        for n, k in ((6144, 4096), (2560, 1024), (8, 16), (40, 144), (12288, 8192), (520, 5120)):
            if not room_for(m, k, smem):
                assert m * k > 64 * 1024
                continue
            config = projection_config(m, n, k, sms=sms, smem_limit=smem, weight=norm).check()
            assert config.smem_bytes <= smem
            assert config.rows >= m and 128 * config.slabs >= k > 128 * (config.slabs - 1)
            assert config.warp_blocks <= WARP_BLOCKS
            assert config.least_k <= k and config.early <= config.stages
            # What hides latency: 16 KB on their way, or all of a CTA's weights.
            whole = config.blocks * 2048 * config.slabs
            assert config.stages * config.stage_bytes >= min(8192, whole)


@pytest.mark.parametrize("smem", [SM90, SM120])
def test_a_stage_is_always_the_same_warps(smem: int) -> None:
    """As the kernel's MMA warps walk: every slab once, a stage never another warp's."""
    for m in ROWS:
        for n, k in ((6144, 4096), (18952, 272), (40, 144), (8, 16), (2560, 1024)):
            c = projection_config(m, n, k, sms=2, smem_limit=smem).check()
            owners: dict[int, set[int]] = {}
            for number in range(5):
                before, taken = number * c.slabs, []
                for warp in range(c.k_warps):
                    first = (before + c.k_warps - 1 - warp) // c.k_warps * c.k_warps + warp
                    for at in range(first, before + c.slabs, c.k_warps):
                        owners.setdefault(at % c.stages, set()).add(warp)
                        taken.append(at - before)
                assert sorted(taken) == list(range(c.slabs))
            assert all(len(warps) == 1 for warps in owners.values())


def test_configurations_that_are_refused() -> None:
    config = projection_config(4, 6144, 4096, sms=132, smem_limit=SM90)
    for change, message in (
        ({"dtype": "float32"}, "dtype: got float32, must be bfloat16 or float16"),
        ({"rows": 3}, "rows: got 3, must be one of (1, 2, 4, 8, 16)"),
        ({"row_warps": 3}, "row_warps: got 3 for 3 blocks, must be 1, 2, 4 or 8, of at most 4 "),
        ({"blocks": 5}, "row_warps: got 1 for 5 blocks, must be 1, 2, 4 or 8, of at most 4 "),
        ({"stages": 0}, "stages: got 0, must be a multiple of 8 up to 288"),
        ({"stages": 12}, "stages: got 12, must be a multiple of 8 up to 288"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            ProjectionConfig(**{**vars(config), **change}).check()
        assert str(caught.value).startswith(message)


def test_what_is_shipped() -> None:
    for target in ("sm_90a", "sm_120a", "sm_121a", None):
        found = shipped_projections(target)
        most = 4 if target == "sm_90a" else max(ROWS)
        assert {config.rows for config in found} == {n for n in ROWS if n <= most}
        assert all(config.pdl for config in found)
        assert len({config.name for config in found}) == len(found)
