"""More than 2^31 elements, and bytes, in each operand and in the output: 64-bit addresses."""

from __future__ import annotations

import pytest
import torch

import cute_fp8

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.xdist_group("large")]
LIMIT = 2**31
E4M3 = torch.float8_e4m3fn


def signs(rows: int, k: int, seed: int) -> torch.Tensor:
    """Codes of +-1 (0x38 or 0xB8), made in place: no fp32 copy of a large operand."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.randint(0, 2, (rows, k), dtype=torch.uint8, device="cuda", generator=generator)
    return bits.mul_(0x80).add_(0x38).view(E4M3)


def check_rows(y, xq, wq, rows, columns):
    """A sample of rows and columns, exactly; +-1 codes and unit scales sum to integers."""
    exact = xq[rows].double() @ wq[columns].double().t()
    assert torch.equal(y[rows][:, columns].double(), exact)


@pytest.fixture(autouse=True)
def memory():
    """Tens of gigabytes, given back at once."""
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of free GPU memory, there are {free >> 30}")
    yield
    torch.cuda.empty_cache()


def ends(count: int) -> torch.Tensor:
    """First, last and some middle indices of ``count``."""
    return torch.tensor([0, 1, count // 2, count // 2 + 1, count - 2, count - 1], device="cuda")


@pytest.mark.parametrize("m_side", [True, False], ids=["xq", "wq"])
def test_large_operand(backend, m_side):
    rows, k = 131080, 16400
    assert rows * k > LIMIT
    large, small = signs(rows, k, 1), signs(16, k, 2)
    one = torch.ones((), device="cuda")
    xq, wq = (large, small) if m_side else (small, large)
    y = cute_fp8.gemm(xq, one, wq, one, out_dtype=torch.float32)
    check_rows(y, xq, wq, ends(xq.shape[0]), ends(wq.shape[0]))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_output(backend, out_dtype):
    m, n, k = 32776, 65544, 32
    assert m * n > LIMIT
    xq, wq = signs(m, k, 3), signs(n, k, 4)
    one = torch.ones((), device="cuda")
    y = cute_fp8.gemm(xq, one, wq, one, out_dtype=out_dtype)
    check_rows(y, xq, wq, ends(m), ends(n))
    # Every element was written: sums of 32 signs are even integers of at most 32.
    assert torch.isfinite(y).all() and y.abs().max() <= k


def test_large_residual(backend):
    m, n, k = 32776, 65544, 16
    xq, wq = signs(m, k, 5), signs(n, k, 6)
    one = torch.ones((), device="cuda")
    residual = torch.zeros((m, n), dtype=torch.bfloat16, device="cuda")
    residual[-1, -8:] = 64.0
    residual[0, :8] = 32.0
    y = cute_fp8.gemm(xq, one, wq, one, residual=residual)
    rows, columns = ends(m), ends(n)
    exact = xq[rows].double() @ wq[columns].double().t() + residual[rows][:, columns].double()
    assert torch.equal(y[rows][:, columns].double(), exact)


def test_row_strides_past_the_limit(backend):
    """Few rows, far apart: the stride itself times a row passes 2^31."""
    m, n, k = 40, 64, 64
    stride = LIMIT // 32 + 16
    buffer = torch.zeros(m * stride, dtype=torch.uint8, device="cuda")
    xq = buffer.as_strided((m, k), (stride, 1)).view(E4M3)
    xq.view(torch.uint8).copy_(signs(m, k, 7).view(torch.uint8))
    wq = signs(n, k, 8)
    one = torch.ones((), device="cuda")
    y = cute_fp8.gemm(xq, one, wq, one, out_dtype=torch.float32)
    check_rows(y, xq, wq, ends(m), ends(n))
