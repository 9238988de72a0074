"""The fused epilogue: ``y = act(acc * sx[m] * sw[n] + bias[n]) + residual[m, n]``, one rounding,
16-byte stores.

All math is fp32 in the accumulator's own layout; the only rounding is the last one, to the output's
dtype. Nothing goes through shared memory, so the epilogue of one tile can never meet the ring stage
that the producer is filling for the next.

The work goes by 8x8 pieces (``pieces.py``), four at a time: side by side where a warp's output
columns are a multiple of 32, else fewer of them in several rows. The pieces of a swapped kernel,
which computes ``out^T``, are transposed first; from then on both kinds are alike. In a gated one,
whose channels alternate in blocks of 8, a piece of gate and the piece of up beside it become one of
output.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import select_

from .config import MX_BLOCK, PIECE, STORE_COLUMNS, EpilogueConfig, TileConfig
from .mx_output import pack_pairs, quantize_block, scale_offset
from .pieces import pair_words, transpose_pieces, transpose_planes

if TYPE_CHECKING:
    from .config_sm90 import WarpShare

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
#: Pieces that are stored together, one by each lane of a quad.
GROUP = STORE_COLUMNS // PIECE
#: Registers for the residual of groups to come; where scales are in shared memory, and not there.
#: It cannot be read behind a store, which might be to the same place for all that the compiler
#: knows: read group by group, every one would be waited for.
RESIDUAL_WORDS = {True: 32, False: 16}
_UNKNOWN: Any = None
_LOG2_E = math.log2(math.e)


def activate(name: str | None, x: Float32) -> Float32:
    """The activation ``name`` of one fp32 value. Every one of them passes NaN on."""
    if name is None:
        return x
    if name == "relu":
        # Not max(x, 0): a maximum drops NaN.
        return select_(x < Float32(0.0), Float32(0.0), x)
    if name == "silu":
        return _silu(x)
    if name == "gelu":
        return Float32(0.5) * x * (Float32(1.0) + cute.math.erf(x * Float32(math.sqrt(0.5))))
    if name == "gelu_tanh":
        inner = Float32(math.sqrt(2.0 / math.pi)) * (x + Float32(0.044715) * x * x * x)
        return Float32(0.5) * x * (Float32(1.0) + cute.math.tanh(inner))
    raise ValueError(f"activation: got {name!r}")


def _silu(x: Float32) -> Float32:
    """``x / (1 + exp(-x))``, as the product with the divisor's reciprocal, rounded to 1 ulp.

    With ``e = exp(-|x|)`` the divisor is 1 + e, from 1 to 2, whatever x is, and needs none of the
    branches of a division of any two numbers. The dividend is x, or x * e below zero.
    """
    # 2^t, corrected for what the rounding of t = -|x| * log2(e) has lost.
    # Past 128, e is 0 anyway, and what is lost of infinity would be NaN.
    magnitude = cute.arch.fmin(cute.math.abs(x), Float32(128.0))
    t = magnitude * Float32(-_LOG2_E)
    lost = cute.math.fma(magnitude, Float32(-_LOG2_E), -t)
    e = cute.arch.exp2(t)
    e = cute.math.fma(e * Float32(math.log(2.0)), lost, e)
    divisor = Float32(1.0) + e
    dividend = Float32(select_(x < Float32(0.0), x * e, x))
    # Corrected in the reciprocal, not in the quotient: Inf and -0 would not survive that.
    reciprocal = cute.arch.rcp_approx(divisor)
    error = cute.math.fma(-divisor, reciprocal, Float32(1.0))
    return dividend * cute.math.fma(error, reciprocal, reciprocal)


class EpilogueOperands(NamedTuple):
    """Global tensors of the epilogue; a part that the configuration leaves out is None."""

    out: cute.Tensor  # (m, output columns)
    out_scales: Any  # bytes of blocked e8m0 scales, of an MXFP8 output
    sx: Any  # (m,) or None
    sw: Any  # (n,) or None
    bias: Any  # (n,) or None
    residual: Any  # (m, output columns) or None


class Place(NamedTuple):
    """Where this lane stores the 8 columns that it has of a group of pieces."""

    row: Int32
    column: Int32
    exists: cutlass.Boolean


class Epilogue:
    """The epilogue of one warp's part of a tile, specialised by :class:`EpilogueConfig`."""

    def __init__(
        self,
        tile: TileConfig | WarpShare,
        config: EpilogueConfig,
        *,
        scaled: bool,
        staged: bool = False,
    ):
        self.config = config
        #: Whether there is a scale for every row and channel of a tile, past the problem's, too.
        self.staged = staged
        self.swapped = tile.swap_ab
        #: Whether scales are applied here; if not, the accumulator carries them.
        self.scaled = scaled
        #: Accumulator columns of one output column: a gate and an up.
        self.ratio = 2 if config.gated else 1
        #: Pieces: rows, columns, output columns.
        self.rows, self.columns = tile.warp_m // PIECE, tile.warp_n // PIECE
        self.out_columns = self.columns // self.ratio
        #: Pieces of one group: side by side, as many as go into the columns, and below each other.
        self.across = math.gcd(GROUP, self.out_columns)
        self.down = GROUP // self.across
        #: The first piece of every group.
        self.groups = [
            (i, j)
            for i in range(0, self.rows, self.down)
            for j in range(0, self.out_columns, self.across)
        ]
        #: Groups whose residual is read ahead.
        width = 0 if config.residual is None else DTYPES[config.residual].width
        self.ahead = RESIDUAL_WORDS[staged] * 32 // (2 * GROUP * width or 1)

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
        """Write one warp's part of a tile.

        Args:
            acc: fp32 accumulators as the MMA leaves them, ``(4, columns / 8, rows / 16)`` per lane.
                Consumed.
            operands: the output and what it is made with.
            m, n: tokens and channels; nothing past them is read or written.
            first_row, first_column: the part's first token and channel.
        """
        if cutlass.const_expr(self.swapped):
            transpose_pieces(acc, lane)
        quad, lane_in_quad = lane // 4, lane % 4
        channels = self._channel_values(operands, n, first_column + 2 * lane_in_quad)
        row_scales, residuals = _UNKNOWN, _UNKNOWN
        for number in cutlass.range_constexpr(len(self.groups)):
            i, j = self.groups[number]
            if cutlass.const_expr(j == 0):
                row_scales = self._row_scales(operands, m, first_row + i * PIECE + quad)
            values = cute.make_rmem_tensor((2, GROUP), Float32)
            for piece in cutlass.range_constexpr(GROUP):
                below, beside = piece // self.across, j + piece % self.across
                for e in cutlass.range_constexpr(2):
                    values[e, piece] = Float32(0.0)
                    if cutlass.const_expr(i + below < self.rows):
                        values[e, piece] = self._value(
                            acc, row_scales[below], channels, e, i + below, beside
                        )
            place = self._place(i, j, m, n, first_row + quad, first_column, lane_in_quad)
            if cutlass.const_expr(self.config.residual is not None):
                if cutlass.const_expr(number % self.ahead == 0):
                    residuals = self._residuals(
                        number, operands.residual, m, n, first_row + quad, first_column, lane
                    )
                self._add_residual(values, residuals[number % self.ahead], lane_in_quad)
            if cutlass.const_expr(self.config.mx):
                self._store_mx(values, operands, place, n, lane_in_quad)
            else:
                self._store(values, operands.out, place, lane_in_quad)

    @cute.jit
    def _row_scales(self, operands: EpilogueOperands, m: Int32, row: Int32):
        """This lane's token scale in each row of pieces of a group."""
        scales = cute.make_rmem_tensor(self.down, Float32)
        for below in cutlass.range_constexpr(self.down):
            if cutlass.const_expr(self.scaled):
                # Clamped, not predicated: a lane past the end takes part in the shuffles and stores
                # nothing.
                safe_row = row + below * PIECE
                if cutlass.const_expr(not self.staged):
                    safe_row = cutlass.min(safe_row, m - 1)
                scales[below] = operands.sx[safe_row]
        return scales

    @cute.jit
    def _channel_values(self, operands: EpilogueOperands, n: Int32, channel: Int32):
        """Scale and bias of this lane's channels: ``(2, columns / 8)`` registers each."""
        shape = (2, self.columns)
        scale = cute.make_rmem_tensor(shape, Float32)
        bias = cute.make_rmem_tensor(shape, Float32)
        for j in cutlass.range_constexpr(self.columns):
            for e in cutlass.range_constexpr(2):
                index = channel + j * PIECE + e
                safe = cutlass.min(index, n - 1)
                if cutlass.const_expr(self.scaled):
                    scale[e, j] = operands.sw[index if self.staged else safe]
                if cutlass.const_expr(self.config.bias is not None):
                    bias[e, j] = operands.bias[safe].to(Float32)
        return scale, bias

    @cute.jit
    def _value(
        self,
        acc: cute.Tensor,
        row_scale: Float32,
        channels,
        e: cutlass.Constexpr,
        i: cutlass.Constexpr,
        j: cutlass.Constexpr,
    ):
        """One output before its residual, of output piece (i, j)."""
        if cutlass.const_expr(self.config.gated):
            gate = self._scaled(acc, row_scale, channels, e, i, 2 * j)
            up = self._scaled(acc, row_scale, channels, e, i, 2 * j + 1)
            return activate(self.config.activation, gate) * up
        x = self._scaled(acc, row_scale, channels, e, i, j)
        return activate(self.config.activation, x)

    @cute.jit
    def _scaled(
        self,
        acc: cute.Tensor,
        row_scale: Float32,
        channels,
        e: cutlass.Constexpr,
        i: cutlass.Constexpr,
        j: cutlass.Constexpr,
    ):
        """One accumulator of piece (i, j) with its scales and its bias."""
        scale, bias = channels
        if cutlass.const_expr(self.swapped):
            x = acc[j % 2 * 2 + e, i, j // 2]
        else:
            x = acc[i % 2 * 2 + e, j, i // 2]
        if cutlass.const_expr(self.scaled):
            x = x * row_scale * scale[e, j]
        if cutlass.const_expr(self.config.bias is not None):
            x = x + bias[e, j]
        return x

    @cute.jit
    def _place(
        self,
        i: cutlass.Constexpr,
        j: cutlass.Constexpr,
        m: Int32,
        n: Int32,
        first_row: Int32,
        first_column: Int32,
        lane_in_quad: Int32,
    ) -> Place:
        """For the group of pieces from (i, j) on, of which a lane stores its own place's."""
        below, beside = lane_in_quad // self.across, lane_in_quad % self.across
        row = first_row + (i + below) * PIECE
        column = first_column // self.ratio + (j + beside) * PIECE
        exists = (row < m) & (column < n // self.ratio)
        if cutlass.const_expr(i + self.down > self.rows):
            exists = exists & (i + below < self.rows)
        return Place(row, column, exists)

    @cute.jit
    def _residuals(
        self,
        number: cutlass.Constexpr,
        residual: cute.Tensor,
        m: Int32,
        n: Int32,
        first_row: Int32,
        first_column: Int32,
        lane: Int32,
    ):
        """Start to read what is added at a lane's places, in as many groups from one on as there
        are registers for.
        """
        return [
            self._read(residual, self._place(i, j, m, n, first_row, first_column, lane % 4), m, n)
            for i, j in self.groups[number : number + self.ahead]
        ]

    @cute.jit
    def _read(self, residual: cute.Tensor, place: Place, m: Int32, n: Int32) -> cute.Tensor:
        # n is a multiple of 8: a piece is inside or outside as a whole.
        row = cutlass.min(place.row, m - 1)
        column = cutlass.min(place.column, n // self.ratio - PIECE)
        read = cute.make_rmem_tensor((2, GROUP), residual.element_type)
        read.store(_lane_columns(residual, row, column).load().reshape((2, GROUP)))
        return read

    @cute.jit
    def _add_residual(self, values: cute.Tensor, read: cute.Tensor, lane_in_quad: Int32):
        transpose_planes(cute.recast_tensor(read, Int32), lane_in_quad)
        for piece in cutlass.range_constexpr(GROUP):
            for e in cutlass.range_constexpr(2):
                values[e, piece] = values[e, piece] + read[e, piece].to(Float32)

    @cute.jit
    def _store(self, values: cute.Tensor, out: cute.Tensor, place: Place, lane_in_quad: Int32):
        words = pair_words(values, DTYPES[self.config.out])
        transpose_planes(words, lane_in_quad)
        if place.exists:
            target = cute.recast_tensor(_lane_columns(out, place.row, place.column), Int32)
            cute.autovec_copy(cute.make_tensor(words.iterator, target.layout), target)

    @cute.jit
    def _store_mx(
        self,
        values: cute.Tensor,
        operands: EpilogueOperands,
        place: Place,
        n: Int32,
        lane_in_quad: Int32,
    ):
        words, byte = quantize_block(values, lane_in_quad)
        if place.exists:
            target = cute.recast_tensor(_lane_columns(operands.out, place.row, place.column), Int32)
            cute.autovec_copy(cute.make_tensor(pack_pairs(words).iterator, target.layout), target)
            if lane_in_quad == 0:
                block_columns = cute.ceil_div(n // self.ratio, MX_BLOCK * 4)
                offset = scale_offset(place.row, place.column // MX_BLOCK, block_columns)
                operands.out_scales[offset] = byte.to(cutlass.Uint8)


@cute.jit
def _lane_columns(tensor: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """The 8 consecutive elements of ``tensor`` that one lane reads or writes, aligned."""
    # 64-bit: a row times its stride passes 2^31 in large outputs.
    offset = Int64(row) * tensor.stride[0] + column
    pointer = tensor.iterator + offset
    aligned = cute.make_ptr(
        tensor.element_type,
        pointer.toint(),
        cute.AddressSpace.gmem,
        assumed_align=min(16, PIECE * tensor.element_type.width // 8),
    )
    return cute.make_tensor(aligned, cute.make_layout(PIECE))
