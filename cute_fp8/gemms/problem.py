"""Argument checks of a GEMM call, and what remains of it once checked: a :class:`GemmProblem`.

Every rule of the public API is enforced here, once per combination of shapes, strides and dtypes,
before any route is chosen: the same rules hold on a CPU. A refusal is one line: the argument, what
it got, what it must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_fp8.arguments import ALIGNMENT, check_aligned, check_tensor, has_storage, refuse_grad
from cute_fp8.kernels.config import ACTIVATIONS, K_MULTIPLE, N_MULTIPLE
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.scales import blocked_numel

#: Blocks of 8 gate rows and 8 up rows in turn.
GATED_N_MULTIPLE = 2 * N_MULTIPLE
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_INPUTS = ("xq", "sx", "wq", "sw", "bias", "residual")


class Operands(NamedTuple):
    """The tensors of one GEMM call; see :func:`cute_fp8.gemm`."""

    xq: Tensor
    sx: Tensor
    wq: Tensor
    sw: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True)
class GemmProblem:
    """A checked GEMM call without its data: sizes, strides (in elements), dtypes, options.

    ``sx_stride`` and ``sw_stride`` are between consecutive rows' scales, 0 where one scale serves
    all. The MXFP8 variant has ``sx_blocked`` and ``sw_blocked`` instead.
    """

    variant: str
    m: int
    n: int
    k: int
    batch: tuple[int, ...]
    device: torch.device
    out_dtype: torch.dtype
    xq_stride: int
    wq_stride: int
    out_stride: int
    residual_stride: int = 0
    sx_stride: int = 1
    sw_stride: int = 1
    sx_is_vector: bool = True
    sw_is_vector: bool = True
    sx_blocked: bool = False
    sw_blocked: bool = False
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    activation: str | None = None
    fast_accum: bool = False
    gated: bool = False

    @property
    def op(self) -> str:
        """The name that the dispatch table knows it by."""
        return "gemm_gated" if self.gated else "gemm"

    @property
    def out_columns(self) -> int:
        """N, or half of it where channels are pairs of gate and up."""
        return self.n // 2 if self.gated else self.n

    @property
    def out_shape(self) -> tuple[int, ...]:
        """``[..., output columns]``."""
        return (*self.batch, self.out_columns)


def check_gemm(
    operands: Operands,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    gated: bool = False,
) -> GemmProblem:
    """Check every argument of :func:`cute_fp8.gemm`, or :func:`cute_fp8.gemm_gated`.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, stride, alignment, device, overlap or option.
        RuntimeError: an input requires grad while grad mode is on.
    """
    xq, sx, wq, sw, bias, residual, out = operands
    tensors = operands._asdict()
    _check_tensors(tensors)
    _check_options(activation, out_dtype, fast_accum)
    variant = _variant(sx, sw)
    batch, m, k = _check_xq(xq, MX_BLOCK if variant == "mxfp8" else K_MULTIPLE)
    n = _check_wq(wq, k, GATED_N_MULTIPLE if gated else N_MULTIPLE)
    _check_devices(tensors)
    out_columns = n // 2 if gated else n
    _check_out_dtype(variant, out_dtype, out_columns, out)
    problem = GemmProblem(
        variant=variant,
        m=m,
        n=n,
        k=k,
        batch=batch,
        device=xq.device,
        out_dtype=out_dtype,
        xq_stride=_row_stride("xq", xq),
        wq_stride=_row_stride("wq", wq),
        out_stride=out_columns,
        activation=activation,
        fast_accum=fast_accum,
        gated=gated,
        **_check_scales(variant, sx, sw, batch, m, n, k),
    )
    if bias is not None:
        problem = replace(problem, bias=_check_bias(bias, n))
    if residual is not None:
        y_dtype = torch.bfloat16 if out_dtype is E4M3 else out_dtype
        stride = check_matrix("residual", residual, problem.out_shape, (y_dtype, torch.float32))
        problem = replace(problem, residual=residual.dtype, residual_stride=stride)
    if out is not None:
        stride = check_matrix("out", out, problem.out_shape, (out_dtype,), own_rows=True)
        problem = replace(problem, out_stride=stride)
        check_overlap(operands)
    check_grad(operands)
    return problem


def check_grad(tensors: Iterable[Tensor | None]) -> None:
    """Raise ``RuntimeError`` if any tensor requires grad while grad mode is on: inference only."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in zip((*_INPUTS, "out"), tensors, strict=False):
        if tensor is not None:
            refuse_grad(name, tensor)


def check_overlap(operands: Operands) -> None:
    """Raise ``ValueError`` if the addresses from first to last of ``out`` meet an input's."""
    out = operands.out
    if out is None or not has_storage(out):
        return
    first, last = _extent(out)
    for name, tensor in zip(operands._fields[:-1], operands[:-1], strict=True):
        if tensor is None:
            continue
        begin, end = _extent(tensor)
        if begin < last and first < end:
            raise ValueError(f"out: got memory that overlaps {name}, must be separate")


def _check_tensors(tensors: dict[str, Tensor | None]) -> None:
    for name, given in tensors.items():
        if given is None and name in ("bias", "residual", "out"):
            continue
        tensor = check_tensor(name, given)
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: got layout {tensor.layout}, must be torch.strided")


def _check_options(activation: str | None, out_dtype: torch.dtype, fast_accum: bool) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, must be None or one of {', '.join(ACTIVATIONS)}"
        )
    if out_dtype not in (*OUT_DTYPES, E4M3):
        raise TypeError(
            f"out_dtype: got {out_dtype}, must be torch.bfloat16, torch.float16, torch.float32 "
            "(or torch.float8_e4m3fn with MXFP8 inputs)"
        )
    if not isinstance(fast_accum, bool):
        raise TypeError(f"fast_accum: got {type(fast_accum).__name__}, must be a bool")


def _variant(sx: Tensor, sw: Tensor) -> str:
    kinds = {torch.float32: "per_token", E8M0: "mxfp8"}
    for name, scale in (("sx", sx), ("sw", sw)):
        if scale.dtype not in kinds:
            raise TypeError(
                f"{name}: got {scale.dtype}, must be torch.float32 or torch.float8_e8m0fnu"
            )
    if sx.dtype != sw.dtype:
        raise ValueError(f"sw: got {sw.dtype}, must be {sx.dtype} as sx is (scales of one kind)")
    return kinds[sx.dtype]


def _check_xq(xq: Tensor, multiple: int) -> tuple[tuple[int, ...], int, int]:
    if xq.dtype != E4M3:
        raise TypeError(f"xq: got {xq.dtype}, must be torch.float8_e4m3fn")
    if xq.dim() < 1:
        raise ValueError("xq: got 0 dimensions, must be [..., K]")
    k = xq.shape[-1]
    if k == 0 or k % multiple:
        raise ValueError(f"xq: got K = {k}, must be a positive multiple of {multiple}")
    batch = tuple(xq.shape[:-1])
    return batch, batch_size(batch), k


def batch_size(batch: tuple[int, ...]) -> int:
    """Rows of a batch shape; written out, so that symbolic sizes pass."""
    m = 1
    for size in batch:
        m = m * size
    return m


def _check_wq(wq: Tensor, k: int, multiple: int) -> int:
    if wq.dtype != E4M3:
        raise TypeError(f"wq: got {wq.dtype}, must be torch.float8_e4m3fn")
    if wq.dim() != 2:
        raise ValueError(f"wq: got {wq.dim()} dimensions, must be 2-D [N, K]")
    n, k_of_wq = wq.shape
    if k_of_wq != k:
        raise ValueError(f"wq: got K = {k_of_wq}, must be {k} as in xq")
    if n == 0 or n % multiple:
        raise ValueError(f"wq: got N = {n}, must be a positive multiple of {multiple}")
    return n


def _check_devices(tensors: dict[str, Tensor | None]) -> None:
    xq = tensors["xq"]
    assert xq is not None
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != xq.device:
            raise ValueError(f"{name}: got device {tensor.device}, must be {xq.device} as xq is")


def _check_out_dtype(
    variant: str, out_dtype: torch.dtype, columns: int, out: Tensor | None
) -> None:
    if out_dtype is not E4M3:
        return
    if variant != "mxfp8":
        raise ValueError(
            "out_dtype: got torch.float8_e4m3fn with fp32 scales, "
            "must be used with MXFP8 (float8_e8m0fnu) scales"
        )
    if columns % MX_BLOCK:
        raise ValueError(
            f"wq: got {columns} output columns, must be a multiple of {MX_BLOCK} for MXFP8 output"
        )
    if out is not None:
        raise ValueError("out: got a tensor with out_dtype torch.float8_e4m3fn, must be None")


def check_matrix(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    own_rows: bool = False,
) -> int:
    """Check an output-shaped tensor; returns its row stride."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name}: got {tensor.dtype}, must be {' or '.join(map(str, dict.fromkeys(dtypes)))}"
        )
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, must be {shape}")
    stride = _row_stride(name, tensor)
    if own_rows and stride < shape[-1] and batch_size(shape[:-1]) > 1:
        raise ValueError(
            f"{name}: got row stride {stride}, must be at least {shape[-1]} (rows overlap)"
        )
    return stride


def _check_bias(bias: Tensor, n: int) -> torch.dtype:
    if bias.dtype not in OUT_DTYPES:
        raise TypeError(
            f"bias: got {bias.dtype}, must be torch.bfloat16, torch.float16 or torch.float32"
        )
    if tuple(bias.shape) != (n,):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, must be ({n},)")
    if bias.stride(0) != 1 and n > 1:
        raise ValueError(f"bias: got stride {bias.stride(0)}, must be 1")
    return bias.dtype


def _check_scales(
    variant: str, sx: Tensor, sw: Tensor, batch: tuple[int, ...], m: int, n: int, k: int
) -> dict[str, Any]:
    """The fields of :class:`GemmProblem` that say where each row's scales are."""
    if variant == "mxfp8":
        cols = k // MX_BLOCK
        return {
            # 1-D is blocked, also for a 1-D xq.
            "sx_blocked": _check_mx_scale("sx", sx, m, cols, ((m, cols), (*(batch or (m,)), cols))),
            "sw_blocked": _check_mx_scale("sw", sw, n, cols, ((n, cols),)),
        }
    return {
        "sx_stride": _check_fp32_scale("sx", sx, ((m,), (m, 1), batch, (*batch, 1))),
        "sw_stride": _check_fp32_scale("sw", sw, ((n,), (n, 1), (1, n))),
        "sx_is_vector": tuple(sx.shape) == (m,),
        "sw_is_vector": tuple(sw.shape) == (n,),
    }


def _check_fp32_scale(name: str, scale: Tensor, shapes: Sequence[tuple[int, ...]]) -> int:
    if scale.numel() == 1:
        return 0
    if tuple(scale.shape) not in shapes:
        wanted = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name}: got shape {tuple(scale.shape)}, must be {wanted} or one element")
    # Without their count: a symbolic size written into a string is fixed to one value.
    wanted = "one stride between its values"
    return _flat_stride(name, scale, scale.shape, scale.stride(), wanted)


def _check_mx_scale(
    name: str, scale: Tensor, rows: int, cols: int, shapes: Sequence[tuple[int, ...]]
) -> bool:
    numel = blocked_numel(rows, cols)
    if not scale.is_contiguous():
        raise ValueError(f"{name}: got strides {tuple(scale.stride())}, must be contiguous")
    # Dimensions first: comparing sizes with one another makes tracing believe in what it finds.
    if any(scale.dim() == len(shape) and tuple(scale.shape) == shape for shape in shapes):
        return False
    if scale.dim() == 1 and scale.shape[0] == numel:
        check_aligned(name, scale)
        return True
    raise ValueError(
        f"{name}: got shape {tuple(scale.shape)}, must be ({rows}, {cols}) row-major "
        f"or ({numel},) in 128x4 blocks"
    )


def _row_stride(name: str, tensor: Tensor) -> int:
    """Stride between rows of ``[..., columns]``, all batch dimensions as one.

    Columns must be contiguous.
    """
    columns = tensor.shape[-1]
    if tensor.stride(-1) != 1 and columns > 1:
        raise ValueError(f"{name}: got stride {tensor.stride(-1)} in the last dimension, must be 1")
    check_aligned(name, tensor)
    if batch_size(tuple(tensor.shape[:-1])) <= 1:
        return columns
    stride = _flat_stride(
        name, tensor, tensor.shape[:-1], tensor.stride()[:-1], "rows at one stride"
    )
    stride_bytes = stride * tensor.element_size()
    if stride_bytes % ALIGNMENT:
        raise ValueError(
            f"{name}: got a row stride of {stride_bytes} bytes, must be a multiple of {ALIGNMENT}"
        )
    return stride


def _flat_stride(
    name: str, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], wanted: str
) -> int:
    """The one stride of dimensions ``shape`` walked in order; size-1 dimensions do not matter."""
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if not dims:
        return 1
    for (_, outer), (size, inner) in pairwise(dims):
        if outer != size * inner:
            raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, must be {wanted}")
    return dims[-1][1]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First and one-past-last byte address that ``tensor`` touches."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    if tensor.numel() == 0:
        return first, first
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (last + 1) * tensor.element_size()


def without_data(
    m: int, n: int, k: int, variant: str, bias: torch.dtype | None, residual: torch.dtype | None
) -> Operands:
    """Contiguous operands that have no memory: for ``explain``."""

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    columns: tuple[int, ...] = (k // MX_BLOCK,) if variant == "mxfp8" else ()
    scale = E8M0 if variant == "mxfp8" else torch.float32
    return Operands(
        xq=empty(E4M3, m, k),
        sx=empty(scale, m, *columns),
        wq=empty(E4M3, n, k),
        sw=empty(scale, n, *columns),
        bias=None if bias is None else empty(bias, n),
        residual=None if residual is None else empty(residual, m, n),
    )
