"""What this GPU can do at most, measured in the run that is compared with it."""

from __future__ import annotations

from typing import Any

import torch

from cute_fp8.evidence.validate import gpu_seconds

#: Shapes whose best rate is the matmul peak: a large one throttles, a small one has fewer waves.
SIZES = ((2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192))


def measure() -> dict[str, float]:
    """Read and copy bandwidth over 1 GiB, and the best bf16 and FP8 matmul rates of torch.

    A rate that torch cannot reach here is left out.
    """
    facts = bandwidths()
    for name, dtype in (("matmul_tflops", torch.bfloat16), ("fp8_tflops", torch.float8_e4m3fn)):
        rates = [rate for shape in SIZES if (rate := _rate(shape, dtype))]
        if rates:
            facts[name] = round(max(rates), 1)
    torch.cuda.empty_cache()
    return facts


def bandwidths() -> dict[str, float]:
    """Read and copy bandwidth over 1 GiB."""
    data = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(data)
    size = data.numel() * data.element_size()
    return {
        "read_gbps": round(1e-9 * size / gpu_seconds(lambda: data.sum()), 1),
        "copy_gbps": round(2e-9 * size / gpu_seconds(lambda: target.copy_(data)), 1),
    }


def _rate(shape: tuple[int, int, int], dtype: torch.dtype) -> float | None:
    m, n, k = shape
    a, b = (torch.randn((rows, k), device="cuda").to(dtype) for rows in (m, n))
    one = torch.ones((), device="cuda")

    def fp8() -> object:
        return torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    try:
        seconds = gpu_seconds(fp8 if dtype.itemsize == 1 else lambda: a @ b.t())
    except RuntimeError:
        return None
    return 2e-12 * m * n * k / seconds


def share(row: dict[str, Any], operand_bytes: int, roofs: dict[str, Any]) -> float | None:
    """The fraction of the roofline that a timed GEMM reaches; None where a roof is unknown.

    The roof of a shape is the time that its operations take at the matmul peak or its bytes at the
    read bandwidth, whichever is longer.
    """
    peak = roofs.get("fp8_tflops" if operand_bytes == 1 else "matmul_tflops")
    if peak is None or "read_gbps" not in roofs:
        return None
    m, n, k = row["M"], row["N"], row["K"]
    moved = operand_bytes * k * (m + n) + 2 * m * n
    floor = max(2e-6 * m * n * k / peak, 1e-3 * moved / roofs["read_gbps"])
    return float(f"{floor / row['us']:.4g}")
