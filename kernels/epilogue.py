"""The fused epilogue: ``y = act(acc * sx[m] * sw[n] + bias[n]) + residual[m, n]``, one rounding,
16-byte stores.

All math is fp32 in the accumulator's own layout; the only rounding is the last one, to the output's
dtype. Nothing goes through shared memory, so the epilogue of one tile can never meet the ring stage
that the producer is filling for the next.

An m16n8 accumulator gives a lane two neighbouring columns, too few for a wide store. Four
accumulators side by side (32 columns) give the four lanes of a quad 4x4 such pairs; transposing
them (``quad_transpose``) leaves each lane with 8 consecutive columns of one row: 16 bytes of bf16,
32 of fp32. The transpose is its own inverse, so the residual is read the same way.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import select_

from .config import MMA_M, MMA_N, EpilogueConfig

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
#: Columns that one quad transpose covers, and that one lane of it stores.
GROUP_COLUMNS, LANE_COLUMNS = 32, 8


def activate(name: str | None, x: Float32) -> Float32:
    """The activation ``name`` of one fp32 value. Every one of them passes NaN on."""
    if name is None:
        return x
    if name == "relu":
        # Not max(x, 0): a maximum drops NaN.
        return select_(x < Float32(0.0), Float32(0.0), x)
    if name == "silu":
        return x / (Float32(1.0) + cute.math.exp(-x))
    if name == "gelu":
        return Float32(0.5) * x * (Float32(1.0) + cute.math.erf(x * Float32(math.sqrt(0.5))))
    if name == "gelu_tanh":
        inner = Float32(math.sqrt(2.0 / math.pi)) * (x + Float32(0.044715) * x * x * x)
        return Float32(0.5) * x * (Float32(1.0) + cute.math.tanh(inner))
    raise ValueError(f"activation: got {name!r}")


@cute.jit
def quad_transpose(words: cute.Tensor, lane_in_quad: Int32):
    """Transpose, in place, the 4x4 matrix of 32-bit words that a quad's lanes hold (row: lane,
    column: index).

    Two butterfly steps: 2x2 blocks across lanes that differ in bit 0, then blocks across bit 1.
    """
    for bit in cutlass.range_constexpr(2):
        distance = 1 << bit
        upper = (lane_in_quad & distance) != 0
        for pair in cutlass.range_constexpr(2):
            low = pair * 2 if bit == 0 else pair
            high = low + distance
            sent = select_(upper, words[low], words[high])
            received = cute.arch.shuffle_sync_bfly(sent, distance)
            words[low] = select_(upper, received, words[low])
            words[high] = select_(upper, words[high], received)


@cute.jit
def pair_words(values: cute.Tensor, dtype: cutlass.Constexpr):
    """Neighbouring columns' values (2 x 4 fp32: in pair, pair) as planes of 32-bit words: (plane,
    pair).
    """
    if cutlass.const_expr(dtype is Float32):
        return cute.recast_tensor(values, Int32)
    rounded = cute.make_rmem_tensor(values.layout, dtype)
    rounded.store(values.load().to(dtype))
    return cute.recast_tensor(rounded, Int32)


class EpilogueOperands(NamedTuple):
    """Global tensors of the epilogue; a part that the configuration leaves out is None."""

    out: cute.Tensor  # (m, n)
    sx: Any  # (m,) or None
    sw: Any  # (n,) or None
    bias: Any  # (n,) or None
    residual: Any  # (m, n) or None


class Epilogue:
    """The epilogue of one warp tile ``warp_m x warp_n``, specialised by :class:`EpilogueConfig`."""

    def __init__(self, warp_m: int, warp_n: int, config: EpilogueConfig, *, scaled: bool):
        self.warp_m = warp_m
        self.warp_n = warp_n
        self.config = config
        #: Whether scales are applied here; if not, the accumulator carries them.
        self.scaled = scaled

    @cute.jit
    def __call__(
        self,
        acc: cute.Tensor,
        operands: EpilogueOperands,
        m: Int32,
        n: Int32,
        first_row: Int32,
        first_column: Int32,
        lane: Int32,
    ):
        """Write one warp tile.

        Args:
            acc: fp32 accumulators, ``(4, warp_n / 8, warp_m / 16)`` per lane.
            operands: the output and what it is made with.
            m, n: the output's size; rows and columns past it are neither read nor written.
            first_row, first_column: the output coordinate of the warp tile's corner.
        """
        quad, lane_in_quad = lane // 4, lane % 4
        columns = self._column_values(operands, n, first_column + 2 * lane_in_quad)
        for mi in cutlass.range_constexpr(self.warp_m // MMA_M):
            for half in cutlass.range_constexpr(2):
                row = first_row + mi * MMA_M + half * 8 + quad
                # Clamped, not predicated: a lane past the end takes part in the shuffles and stores
                # nothing.
                safe_row = cutlass.min(row, m - 1)
                row_scale = Float32(1.0)
                if cutlass.const_expr(self.scaled):
                    row_scale = operands.sx[safe_row]
                for group in cutlass.range_constexpr(self.warp_n // GROUP_COLUMNS):
                    column = first_column + group * GROUP_COLUMNS + lane_in_quad * LANE_COLUMNS
                    values = cute.make_rmem_tensor((2, 4), Float32)
                    for j in cutlass.range_constexpr(4):
                        for e in cutlass.range_constexpr(2):
                            x = acc[half * 2 + e, group * 4 + j, mi]
                            values[e, j] = self._value(x, row_scale, columns, e, group * 4 + j)
                    if cutlass.const_expr(self.config.residual is not None):
                        self._add_residual(
                            values, operands.residual, safe_row, column, n, lane_in_quad
                        )
                    self._store(values, operands.out, row, column, m, n, lane_in_quad)

    @cute.jit
    def _column_values(self, operands: EpilogueOperands, n: Int32, column: Int32):
        """Scale and bias of this lane's columns: ``(2, warp_n / 8)`` registers each."""
        shape = (2, self.warp_n // MMA_N)
        scale = cute.make_rmem_tensor(shape, Float32)
        bias = cute.make_rmem_tensor(shape, Float32)
        for j in cutlass.range_constexpr(self.warp_n // MMA_N):
            for e in cutlass.range_constexpr(2):
                safe_column = cutlass.min(column + j * MMA_N + e, n - 1)
                if cutlass.const_expr(self.scaled):
                    scale[e, j] = operands.sw[safe_column]
                if cutlass.const_expr(self.config.bias is not None):
                    bias[e, j] = operands.bias[safe_column].to(Float32)
        return scale, bias

    @cute.jit
    def _value(
        self,
        x: Float32,
        row_scale: Float32,
        columns,
        e: cutlass.Constexpr,
        j: cutlass.Constexpr,
    ):
        """One output before its residual, from its accumulator."""
        scale, bias = columns
        if cutlass.const_expr(self.scaled):
            x = x * row_scale * scale[e, j]
        if cutlass.const_expr(self.config.bias is not None):
            x = x + bias[e, j]
        return activate(self.config.activation, x)

    @cute.jit
    def _add_residual(
        self,
        values: cute.Tensor,
        residual: cute.Tensor,
        row: Int32,
        column: Int32,
        n: Int32,
        lane_in_quad: Int32,
    ):
        # n is a multiple of 8: a group of 8 columns is inside or outside as a whole.
        read = cute.make_rmem_tensor((2, 4), residual.element_type)
        read.store(
            _lane_columns(residual, row, cutlass.min(column, n - LANE_COLUMNS))
            .load()
            .reshape((2, 4))
        )
        words = cute.recast_tensor(read, Int32)
        self._transpose_planes(words, lane_in_quad)
        for j in cutlass.range_constexpr(4):
            for e in cutlass.range_constexpr(2):
                values[e, j] = values[e, j] + read[e, j].to(Float32)

    @cute.jit
    def _store(
        self,
        values: cute.Tensor,
        out: cute.Tensor,
        row: Int32,
        column: Int32,
        m: Int32,
        n: Int32,
        lane_in_quad: Int32,
    ):
        words = pair_words(values, DTYPES[self.config.out])
        self._transpose_planes(words, lane_in_quad)
        if row < m and column < n:
            target = cute.recast_tensor(_lane_columns(out, row, column), Int32)
            cute.autovec_copy(cute.make_tensor(words.iterator, target.layout), target)

    @cute.jit
    def _transpose_planes(self, words: cute.Tensor, lane_in_quad: Int32):
        planes = cutlass.const_expr(cute.size(words) // 4)
        by_plane = cute.make_tensor(words.iterator, cute.make_layout((planes, 4)))
        for plane in cutlass.range_constexpr(planes):
            quad_transpose(by_plane[plane, None], lane_in_quad)


@cute.jit
def _lane_columns(tensor: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """The 8 consecutive, 16-byte aligned elements of ``tensor`` that one lane reads or writes."""
    # 64-bit: a row times its stride passes 2^31 in large outputs.
    offset = Int64(row) * tensor.stride[0] + column
    pointer = tensor.iterator + offset
    aligned = cute.make_ptr(
        tensor.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16
    )
    return cute.make_tensor(aligned, cute.make_layout(LANE_COLUMNS))
