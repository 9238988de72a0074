"""How a GEMM behaves among streams, graphs, devices, tracing and the profiler, on a GPU."""

from __future__ import annotations

import pytest
import torch

import cute_fp8
from cute_fp8.build import compiler
from cute_fp8.gemms import plan
from cute_fp8.gemms.case import exact_case, gemm_case
from cute_fp8.kernels.tiles import TILE_64x64

pytestmark = pytest.mark.gpu


def test_side_stream(backend):
    """Work goes to torch's current stream, after what was queued there before."""
    case = exact_case(64, 64, 96, seed=1)
    expected = case.run()
    late = torch.zeros_like(case.xq.view(torch.uint8))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(case.xq.view(torch.uint8))
        y = cute_fp8.gemm(
            late.view(case.xq.dtype), case.sx, case.wq, case.sw, out_dtype=torch.float32
        )
    stream.synchronize()
    assert torch.equal(y, expected)


def test_graph_capture_and_replay(backend):
    case = gemm_case(64, 128, 256, seed=2, bias=torch.bfloat16)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run()
    for seed in (3, 4):
        fresh = gemm_case(64, 128, 256, seed=seed, bias=torch.bfloat16)
        for name in ("xq", "sx", "wq", "sw", "bias"):
            getattr(case, name).view(torch.uint8).copy_(getattr(fresh, name).view(torch.uint8))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, fresh.run())


def test_first_use_inside_a_capture_says_what_to_do(backend):
    case = gemm_case(64, 128, 256, seed=5, out_dtype=torch.float16)
    case.run()
    torch.cuda.synchronize()
    compiler.forget()
    plan.forget()
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match=r"first use .* capture.*compile\(device\)")
    with refused, torch.cuda.graph(graph):
        case.run()
    torch.cuda.synchronize()
    case.check(case.run())


def test_compile_of_a_device_makes_capture_safe(backend):
    compiler.forget()
    plan.forget()
    tile = TILE_64x64
    report = cute_fp8.compile("cuda:0", ops=f"gemm_per_token-{tile.name}-bfloat16")
    assert len(report) == 1
    case = gemm_case(16, 128, 256, seed=6)
    graph = torch.cuda.CUDAGraph()
    with cute_fp8.use(config=tile), torch.cuda.graph(graph):
        y = case.run()
    graph.replay()
    case.check(y)


def test_one_kernel_per_call_and_no_synchronisation(backend, launched):
    case = gemm_case(64, 128, 256, seed=7, bias=torch.bfloat16, residual=torch.bfloat16)
    case.run()
    torch.cuda.synchronize()

    def run() -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    on_gpu = launched(run)
    assert len(on_gpu) == 1, on_gpu


def test_another_device_than_the_current(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, there is one")
    case = gemm_case(64, 128, 256, seed=8, device="cuda:1")
    with torch.cuda.device(0):
        y = case.run()
        assert torch.cuda.current_device() == 0
    assert y.device == torch.device("cuda:1")
    case.check(y)
    with pytest.raises(ValueError, match="sw: got device cuda:0, must be cuda:1"):
        cute_fp8.gemm(case.xq, case.sx, case.wq, case.sw.to("cuda:0"))


def test_torch_compile_with_dynamic_tokens(backend):
    weights = gemm_case(2, 128, 256, seed=9)
    traces = []

    def count(module, inputs):
        traces.append(module)
        return module.forward

    @torch.compile(fullgraph=True, backend=count, dynamic=True)
    def layer(xq, sx):
        return cute_fp8.gemm(xq, sx, weights.wq, weights.sw, activation="silu") + 1

    for m in (2, 17, 64, 300):
        case = gemm_case(m, 128, 256, seed=9)
        expected = cute_fp8.gemm(case.xq, case.sx, weights.wq, weights.sw, activation="silu") + 1
        assert torch.equal(layer(case.xq, case.sx), expected)
    assert len(traces) == 1


def test_opcheck(backend):
    case = gemm_case(16, 64, 96, seed=10, bias=torch.bfloat16)
    codes = (case.xq.view(torch.uint8), case.sx, case.wq.view(torch.uint8), case.sw)
    torch.library.opcheck(
        torch.ops.cute_fp8.gemm, (*codes, case.bias, None, "silu", False, torch.bfloat16, False)
    )
    out = torch.empty((16, 64), dtype=torch.bfloat16, device="cuda")
    options = (case.bias, None, None, False, False)
    torch.library.opcheck(torch.ops.cute_fp8.gemm_out, (*codes, *options, out))


@pytest.mark.needs_cc(9)
@pytest.mark.parametrize("shape", [(1, 256, 512), (352, 1024, 4096), (70, 136, 160)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_torch_routes_keep_the_contract(shape, out_dtype):
    """What a Hopper GPU takes by default, within Hopper's own accumulation error."""
    for options in ({}, {"bias": torch.float32, "activation": "gelu", "residual": torch.float32}):
        case = gemm_case(*shape, seed=12, out_dtype=out_dtype, **options)
        exact, _ = case.exact()
        y = case.run_guarded()
        roundoff = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[out_dtype]
        assert ((y.double() - exact).norm() / exact.norm()).item() <= roundoff + 5e-4


def test_linear_references_on_the_gpu():
    """The reference linears equal their CPU results within both accumulations' error."""
    torch.manual_seed(0)
    x = torch.randn((33, 512), dtype=torch.bfloat16, device="cuda")
    w = torch.randn((256, 512), dtype=torch.bfloat16, device="cuda") / 512**0.5
    bias = torch.randn(256, dtype=torch.bfloat16, device="cuda")
    for quantize, linear in (
        (cute_fp8.quantize_fp8, cute_fp8.fp8_w8a8_linear),
        (cute_fp8.quantize_mxfp8, cute_fp8.mxfp8_linear),
    ):
        q, scale = quantize(w)
        on_gpu = linear(x, q, scale, bias).cpu().double()
        on_cpu = linear(x.cpu(), q.cpu(), scale.cpu(), bias.cpu()).double()
        assert ((on_gpu - on_cpu).norm() / on_cpu.norm()).item() < 4e-3
        assert cute_fp8.near_lossless(on_gpu.float(), (x @ w.t() + bias).cpu()).passed


def test_quantisers_match_the_cpu_bit_for_bit():
    torch.manual_seed(1)
    from cute_fp8.testing import KINDS, inputs

    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = inputs(kind, 37, 96, seed=4, dtype=dtype)
            for quantize in (cute_fp8.quantize_fp8_activations, cute_fp8.quantize_mxfp8):
                on_cpu, on_gpu = quantize(x), quantize(x.cuda())
                for expected, got in zip(on_cpu, on_gpu, strict=True):
                    assert torch.equal(expected.view(torch.uint8), got.cpu().view(torch.uint8)), (
                        kind
                    )
