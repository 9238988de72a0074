"""The row kernel against the reference: bits, strides, tails, values that provoke a rule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.rows.case import RowCase, errors, row_case
from cute_fp8.rows.problem import KERNEL_OPS, OPS, RowInputs, check_rows, result_names
from cute_fp8.rows.reference import quantised
from cute_fp8.testing import KINDS

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
VARIANTS = (
    pytest.param({"variant": "per_token"}, id="per_token"),
    pytest.param({"variant": "mxfp8"}, id="mxfp8"),
    pytest.param({"variant": "mxfp8", "blocked": True}, id="blocked"),
)
GUARD, POISON = 256, 0x55


def case_of(op: str, m: int, k: int, **options: Any) -> RowCase:
    return row_case(op, m, k, device="cuda", **options)


def poisoned(case: RowCase) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Outputs full of poison, each between guard bytes; and the whole memory of each."""
    p = case.problem
    outs, memory = [], []
    for name in result_names(p):
        shape = p.scale_shape if name == "scales" else p.shape
        dtype = {"scales": p.scale_dtype, "codes": E4M3}.get(name, p.dtype)
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")
        memory.append(raw)
        outs.append(raw[GUARD : GUARD + size].view(dtype).view(shape))
    return tuple(outs), memory


def check(case: RowCase) -> None:
    """Right to the bit, nothing left unwritten, nothing written beside it, and the same again."""
    case = case.kept()
    outs, memory = poisoned(case)
    results = case.run(out=outs)
    assert all(a is b for a, b in zip(results, outs, strict=True))
    assert errors(case, results) == []
    for raw in memory:
        assert bool((raw[:GUARD] == POISON).all()) and bool((raw[-GUARD:] == POISON).all())
    for a, b in zip(case.run(), results, strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_the_kernel_is_what_runs() -> None:
    explanation = cute_fp8.explain("rmsnorm_quantize", m=4, k=64)
    assert explanation.route is not None and explanation.route.entry.name == "cute:row_quantize"


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("op", OPS)
def test_every_op(op: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    for m, k in ((1, 32), (5, 96), (130, 1024), (37, 4096), (3, 14336)):
        check(case_of(op, m, k, dtype=dtype, **options))


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("op", [op for op in OPS if KERNEL_OPS[op] != "quantize"])
def test_the_same_where_nothing_is_kept(op: str, options: dict[str, Any]) -> None:
    # The kernels that are used: `check` needs those that return what they quantise.
    for m, k in ((5, 1056), (37, 4096), (3, 14336)):
        case = case_of(op, m, k, **options)
        kept = case.kept().run()
        for a, b in zip(case.run(), kept, strict=False):
            assert torch.equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_provoke_a_rule(kind: str, options: dict[str, Any]) -> None:
    for dtype in (BF16, FP16, FP32):
        check(case_of("quantize", 33, 512, kind=kind, dtype=dtype, **options))
        check(case_of("rmsnorm_quantize", 33, 512, kind=kind, dtype=dtype, **options))
        check(case_of("silu_mul_quantize", 33, 512, kind=kind, dtype=dtype, **options))


@pytest.mark.parametrize("part", range(20))
def test_two_hundred_random_shapes(part: int) -> None:
    rng = random.Random(part)
    for seed in range(10 * part, 10 * part + 10):
        op, variant = rng.choice(OPS), rng.choice(("per_token", "mxfp8"))
        unit = MX_BLOCK if variant == "mxfp8" else 16
        k = unit * rng.randint(1, rng.choice((4, 64, 600)))
        m = rng.randint(1, rng.choice((4, 40, 300)))
        options: dict[str, Any] = {"dtype": rng.choice((BF16, FP16, FP32))}
        options["blocked"] = variant == "mxfp8" and rng.random() < 0.5
        if op == "rmsnorm_quantize":
            options["rounding"] = rng.choice(("hf", "fused"))
            options["offset"] = rng.choice((0.0, 1.0))
        if "norm" in op:
            options["weight"] = rng.choice((BF16, FP16, FP32))
            options["residual"] = rng.random() < 0.5
        if "mul" in op:
            options["layout"] = rng.choice(("halves", "interleaved"))
        kind = rng.choice(("gaussian", "heavy_tailed", "nan_rows", "massive_channel"))
        check(case_of(op, m, k, variant=variant, kind=kind, seed=seed, **options))


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("op", [op for op in OPS if op != "attention_out_quantize"])
@pytest.mark.parametrize("k", [16384, 16416, 32768, 65536, 100_000])
def test_long_rows(op: str, k: int, options: dict[str, Any]) -> None:
    case = case_of(op, 3, k - k % MX_BLOCK, **options)
    residual = {"residual": True} if "norm" in op else {}
    check(case)
    if residual:
        check(case_of(op, 3, k - k % MX_BLOCK, **options, **residual))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_pair_of_an_element_and_an_amax(dtype: torch.dtype) -> None:
    # In 16 bits the quotients are corrected once. All mantissas against all, from the amax's own
    # binade down to where every code is zero; and in bf16 from the smallest binades to the largest.
    mantissa = 7 if dtype is BF16 else 10
    count = 1 << mantissa
    fractions = 1 + torch.arange(count, dtype=torch.float64) / count
    tops = (15,) if dtype is FP16 else (0, 120, -60, -85, -95, -110, -120)
    for top in tops:
        values = [fractions * 2.0 ** (top - down) for down in range(20)]
        x = torch.cat([*values, -torch.cat(values)]).to(dtype).cuda().repeat(count, 1)
        amax = (fractions * 2.0**top).to(dtype).cuda().view(-1, 1)
        x = torch.where(x.abs() > amax, amax, x)
        x = torch.cat([x, amax.expand(-1, 16)], dim=1)
        codes, scales = cute_fp8.quantize_fp8_activations(x)
        want = quantised(row_case("quantize", 1, 32).options, x)
        assert torch.equal(as_bytes(scales), as_bytes(want[1]))
        assert torch.equal(as_bytes(codes), as_bytes(want[0]))


def test_fp32_quotients_next_to_every_tie() -> None:
    # Elements within a few steps of where two codes meet, for many scales, also tiny ones.
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).to(torch.float64)
    ties = (codes[1:] + codes[:-1]) / 2
    for exponent in (0, 60, -60, -88, -91, -100, -117):
        amax = (1 + torch.rand(2000, 1, generator=generator)) * 2.0**exponent
        scale = (amax / torch.tensor(448.0)).double()
        near = (ties * scale).float().view(torch.int32)
        steps = torch.arange(-3, 4, dtype=torch.int32).view(-1, 1, 1)
        near = (near + steps).view(torch.float32).permute(1, 2, 0).reshape(2000, -1)
        signs = torch.randint(2, near.shape, generator=generator) * 2 - 1
        padding = amax.expand(-1, -near.shape[1] % 16 or 16)
        x = torch.cat([near * signs, padding], dim=1).cuda()
        got = cute_fp8.quantize_fp8_activations(x)
        want = quantised(row_case("quantize", 1, 32).options, x)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(as_bytes(a), as_bytes(b))


# ------------------------------------------------------------------------------------- strides


def strided(case: RowCase, x: Tensor) -> RowCase:
    return replace(case, inputs=case.inputs._replace(x=x))


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("op", ["quantize", "rmsnorm_quantize", "silu_mul_quantize"])
def test_strides(op: str, options: dict[str, Any]) -> None:
    case = case_of(op, 48, 96, **options)
    x = case.inputs.x
    columns = x.shape[-1]
    big = torch.randn(48, 3 * columns, device="cuda").to(x.dtype)
    views = {
        "gaps between rows": big[:, :columns],
        "an address and a stride of no 16 bytes": big[:, 3 : 3 + columns],
        "every other column": big[:, : 2 * columns : 2],
        "transposed": torch.randn(columns, 48, device="cuda").to(x.dtype).t(),
        "one row again and again": big[:1, :columns].expand(48, -1),
        "a batch of part of the rows": big.view(8, 6, -1)[:, :5, :columns],
        "a batch that no two strides walk": big.view(4, 4, 3, -1)[:3, :3, :2, :columns],
    }
    for name, view in views.items():
        strided_case = strided(case, view)
        results = strided_case.kept().run()
        assert errors(strided_case.kept(), results) == [], name


@pytest.mark.parametrize("options", VARIANTS)
def test_attention_outputs(options: dict[str, Any]) -> None:
    case = case_of("attention_out_quantize", 6, 96, **options)
    for shape in ((2, 3, 5, 32), (1, 2, 7, 64), (3, 4, 1, 8), (2, 8, 9, 12), (2, 3, 4, 96)):
        if shape[1] * shape[3] % MX_BLOCK:
            continue
        b, h, s, d = shape
        dense = torch.randn(shape, device="cuda").bfloat16()
        by_token = torch.randn(b, s, h, d, device="cuda").bfloat16().transpose(1, 2)
        packed = torch.randn(b, s, 3 * h, d, device="cuda").bfloat16()[:, :, h : 2 * h]
        odd = torch.randn(b, h, d, s, device="cuda").bfloat16().transpose(2, 3)
        for o in (dense, by_token, packed.transpose(1, 2), odd):
            check(strided(case, o))


@pytest.mark.parametrize("op", ["rmsnorm_quantize", "quantize"])
def test_outputs_with_gaps(op: str) -> None:
    case = case_of(op, 20, 64, **({"residual": True} if "norm" in op else {})).kept()
    outs = []
    for name in result_names(case.problem):
        if name == "scales":
            outs.append(torch.empty(20, device="cuda"))
            continue
        dtype = torch.uint8 if name == "codes" else BF16
        raw = torch.full((20, 128), POISON, device="cuda").to(dtype)
        outs.append(raw.view(E4M3)[:, 16:80] if name == "codes" else raw[:, 16:80])
    assert errors(case, case.run(out=tuple(outs))) == []
    for tensor in outs:
        if tensor.dim() == 2:
            whole = tensor.view(torch.uint8) if tensor.dtype is E4M3 else tensor
            base = whole.as_strided((20, 128), (128, 1), 0)
            assert bool((base[:, :16] == POISON).all()) and bool((base[:, 80:] == POISON).all())


# ------------------------------------------------------------------------------ rows, in context


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("k", [1024, 4096, 14336, 40_000])
def test_a_row_does_not_depend_on_the_others(op: str, k: int) -> None:
    if op == "attention_out_quantize":
        return
    whole = case_of(op, 70, k - k % MX_BLOCK, kind="heavy_tailed").kept()
    results = whole.run()
    for rows in (slice(0, 1), slice(33, 50), slice(69, 70)):
        inputs: RowInputs = whole.inputs._replace(x=whole.inputs.x[rows])
        part = replace(whole, inputs=inputs).run()
        for a, b in zip(part, results, strict=True):
            assert torch.equal(as_bytes(a), as_bytes(b[rows]))


def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    k = 65536
    m = (1 << 31) // k + 3
    x = torch.empty(m, k, dtype=BF16, device="cuda")
    x.view(-1).random_(-100, 100)
    codes, scales = cute_fp8.quantize_fp8_activations(x)
    for row in (0, m // 2, m - 1):
        want = quantised(row_case("quantize", 1, 32).options, x[row : row + 1])
        assert torch.equal(as_bytes(codes[row]), as_bytes(want[0][0]))
        assert scales[row] == want[1][0]


def test_no_rows() -> None:
    for op in OPS:
        case = case_of(op, 2, 64)
        x = case.inputs.x[:, :, :0] if op == "attention_out_quantize" else case.inputs.x[:0]
        codes, scales = strided(case, x).run()
        assert codes.shape == (0, 64) and scales.shape == (0,)


# ------------------------------------------------------------------------------------ launching


@pytest.mark.parametrize("pdl", [False, True])
def test_in_a_graph_with_new_values(pdl: bool) -> None:
    if pdl and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    first, second = (case_of("rmsnorm_quantize", 64, 512, seed=s, residual=True) for s in (0, 9))
    with cute_fp8.use(pdl=pdl):
        case = first.kept()
        outs = case.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                # Each reads what the one before wrote.
                case.run(out=outs)
                chained = replace(case, inputs=case.inputs._replace(x=outs[3])).run()
    for source, target in zip(second.inputs, first.inputs, strict=True):
        if source is not None and target is not None:
            target.copy_(source)
    for _ in range(20):
        graph.replay()
    assert errors(case, outs) == []
    assert errors(replace(case, inputs=case.inputs._replace(x=outs[3])), chained) == []


def test_one_launch_on_the_current_stream(launched: Any) -> None:
    case = case_of("silu_mul_quantize", 16, 256, variant="mxfp8", blocked=True)
    case.run()
    assert len(launched(case.run)) == 1
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = case.kept().run()
    stream.synchronize()
    assert errors(case.kept(), results) == []


def test_repeats_under_load() -> None:
    case = case_of("rmsnorm_quantize", 352, 4096, residual=True).kept()
    results = case.run()
    side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(20):
            noise @ noise
    for _ in range(200):
        for a, b in zip(case.run(), results, strict=True):
            assert torch.equal(as_bytes(a), as_bytes(b))


def test_the_checked_problem_has_the_right_shape() -> None:
    assert check_rows(*_parts(case_of("silu_mul_quantize", 4, 64))).shape == (4, 64)


def _parts(case: RowCase) -> tuple[Any, Any]:
    return case.inputs, case.options
