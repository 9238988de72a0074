"""The MLP half on the CPU: its op, which serves tracing, is the function; its routes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cute_fp8
from cute_fp8.decoder import mlp
from cute_fp8.decoder.case import DecoderCase, decoder_case
from cute_fp8.decoder.weights import DecoderConfig
from cute_fp8.gemms.ops import as_bytes
from cute_fp8.kernels.mlp_config import (
    MAX_HIDDEN,
    MMA_WARPS,
    TOKENS,
    Cut,
    MlpConfig,
    mlp_config,
    shipped_mlps,
)
from cute_fp8.kernels.row_config import RowShape

SM90, SM120 = 232_448, 101_376


@pytest.fixture(scope="module")
def case() -> DecoderCase:
    return decoder_case(DecoderConfig(128, 256, 4, 2, 32))


def test_the_op_is_the_function(case: DecoderCase) -> None:
    w, x = case.weights, case.x(1, 5)[0]
    operands = (as_bytes(w.gate_up.codes), w.gate_up.scales, as_bytes(w.down.codes), w.down.scales)
    made = torch.ops.cute_fp8.mlp(x, w.mlp_norm, *operands, w.config.eps)
    wanted = mlp.mlp(x, w)
    for a, b in zip(made, wanted, strict=True):
        assert torch.equal(a, as_bytes(b) if b.dtype == torch.float8_e4m3fn else b)
    torch.library.opcheck(torch.ops.cute_fp8.mlp, (x, w.mlp_norm, *operands, w.config.eps))


def test_tracing_sees_one_op(case: DecoderCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there may be a kernel: nothing that tracing cannot follow is asked before."""
    monkeypatch.setattr(mlp, "_few", lambda rows: True)
    x, seen = case.x(1, 5)[0], []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: mlp.mlp(x, case.weights).y, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), mlp.mlp(x, case.weights).y)
    assert [name for name in seen if "cute_fp8" in name] == ["cute_fp8.mlp"]


@pytest.mark.parametrize(
    ("capability", "m", "k", "taken"),
    [
        ((12, 0), 1, 4096, "cute:mlp"),
        ((12, 1), 64, 4096, "cute:mlp"),
        ((12, 0), 65, 4096, "reference:separate_launches"),
        ((12, 0), 1, MAX_HIDDEN + 16, "reference:separate_launches"),
        ((9, 0), 16, 4096, "cute:mlp"),
        ((9, 0), 17, 4096, "reference:separate_launches"),
        ((8, 9), 1, 4096, "reference:separate_launches"),
        (None, 1, 4096, "reference:separate_launches"),
    ],
)
def test_routes(capability: tuple[int, int] | None, m: int, k: int, taken: str) -> None:
    options = {"capability": capability, "device": "cpu"}
    found = cute_fp8.explain("decoder_mlp", m=m, n=14336, k=k, **options)
    assert found.route is not None and found.route.entry.name == taken
    if found.route.block is not None:
        assert isinstance(found.route.block, MlpConfig) and found.route.block.tokens >= m


def test_what_explain_refuses() -> None:
    for sizes in ({"m": 1, "k": 64}, {"m": 1, "n": 40, "k": 64}, {"m": 0, "n": 64, "k": 64}):
        with pytest.raises(ValueError, match=r"m, n, k: got .*, must be sizes, n and k multiples"):
            cute_fp8.explain("decoder_mlp", **sizes)


@pytest.mark.parametrize("smem", [SM90, SM120])
@pytest.mark.parametrize("sms", [36, 48, 70, 132, 170, 188])
def test_every_gpu_has_a_configuration(sms: int, smem: int) -> None:
    for m in TOKENS:
        for hidden, ffn in ((1024, 4096), (4096, 14336), (8192, 28672), (16, 16), (2064, 48)):
            config = mlp_config(m, hidden, ffn, sms=sms, smem_limit=smem).check()
            assert config.smem_bytes <= smem and config.stages >= 2
            for cut, rows in zip(config.cuts, (2 * ffn, hidden), strict=True):
                assert cut.row_warps * cut.k_warps == MMA_WARPS
                assert cut.row_warps * cut.warp_blocks >= cut.blocks
                assert cut.k_warps * cut.warp_slabs == cut.slabs
                blocks = -(-rows // (16 * sms))
                assert -(-blocks // cut.blocks) <= max(1, -(-blocks // MMA_WARPS))


def test_configurations_that_are_refused() -> None:
    config = mlp_config(4, 1024, 4096, sms=132, smem_limit=SM90)
    for change, message in (
        ({"dtype": "float32"}, "dtype: got float32, must be bfloat16 or float16"),
        ({"tokens": 24}, "tokens: got 24, must be one of (8, 16, 32, 64)"),
        ({"norm_shape": RowShape(96, 1)}, "norm_shape: got 96x1, must be of 256"),
        ({"own": (0, 4096)}, "own: got 4 rows of (0, 4096), must be room for some"),
        ({"own": (1024, 1 << 15)}, "own: got 4 rows of (1024, 32768), must be few to announce"),
        ({"stages": 1}, "stages: got 1, must be at least 2"),
        ({"down": Cut(17, 1, 8)}, "cut: got 17x1, must be of at most 2 blocks a warp"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            MlpConfig(**{**vars(config), **change}).check()
        assert str(caught.value) == message


def test_who_does_the_tokens() -> None:
    """Few of them every CTA for itself; two CTAs of a multiprocessor where all weights are few."""

    def config(m: int, hidden: int, ffn: int, smem: int = SM90) -> MlpConfig:
        return mlp_config(m, hidden, ffn, sms=132, smem_limit=smem)

    for m, own in ((1, (1024, 4096)), (4, (1024, 4096)), (8, (1024, 0)), (16, (0, 0))):
        found = config(m, 1024, 4096)
        assert found.own == own and found.ctas == (2 if own[1] else 1)
        assert found.smem_bytes <= SM90 // found.ctas
        assert found.barriers == (2 if own[1] else 3)
    assert config(1, 4096, 14336).own == (4096, 14336)
    assert config(4, 4096, 14336).own == (0, 0) and config(4, 4096, 14336).ctas == 1
    assert config(4, 1024, 4096, SM120).own == (1024, 4096)
    assert config(4, 1024, 4096, SM120).ctas == 1


def test_what_is_shipped() -> None:
    for target, most in (("sm_90a", 16), ("sm_120a", 64), ("sm_121a", 64), (None, 64)):
        found = shipped_mlps(target)
        assert {config.tokens for config in found} == {n for n in TOKENS if n <= most}
        assert all(config.pdl for config in found)
        assert len({config.name for config in found}) == len(found)
