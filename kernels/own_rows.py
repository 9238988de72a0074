"""Few rows that every CTA normalises and quantises for itself, into its own shared memory.

Every CTA reads all rows and does the same work: no CTA waits for another. That pays where the rows
are few: what a meeting of the grid costs is saved, and so is the way of the codes through L2.

Codes lie as an MMA's operand does that TMA has brought: *slabs* of 128 of K, of each slab a line
of 128 bytes a row, in which the 16-byte pieces are permuted by the row number (``smem.py``). A slab
has as many lines as there is room for rows, also fewer than the 8 of an MMA: whoever reads takes
the row number modulo the room.

The threads of a CTA are cut into groups of as many as a row has by its :class:`RowShape`, whose
rows lie side by side; a group takes several rows together, whose reductions share their barriers.
A row's sum is added up as ``row_quantize.py`` does it with the same shape: codes and scales are the
same, bit for bit. Warps that make no group have no row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import select_

from .config import WARP_SIZE
from .e4m3 import token_codes, token_scale
from .epilogue import DTYPES
from .row_config import CHUNK, NORMS, RowConfig
from .row_inputs import row_offset, store_codes
from .row_norm import RowNorm
from .row_output import RowOutput
from .row_parts import Norm, Operands, Row, chunk_of
from .row_reduce import Exchange, all_max, all_sums
from .row_source import RowSource
from .row_values import amax_bits, chunk_words, widened
from .smem import swizzle_bits

#: K of a slab, which is a line's bytes.
SLAB = 128
#: Chunks of 8 elements that a thread holds at a time, of all its rows.
MOST_CHUNKS = 16


class OwnCodes(NamedTuple):
    """Shared memory.

    Attributes:
        address: of the codes, a multiple of 1024.
        scales: fp32, of every row.
        words: Int32, ``OwnRows.words`` of them.
    """

    address: Int32
    scales: cute.Tensor
    words: cute.Tensor


class OwnRows:
    """Specialised by the row kernel's configuration whose work it does.

    Args:
        config: per token, 16 bits, rows that are held; ``rmsnorm`` or ``quantize``.
        rows: for which there is room.
        warps: that share the work; barrier: the number of one for them alone.
        most: chunks of 8 elements that a thread holds at a time, of all its rows.
    """

    def __init__(
        self, config: RowConfig, rows: int, warps: int, barrier: int, most: int = MOST_CHUNKS
    ):
        self.config, self.rows, self.warps, self.barrier = config, rows, warps, barrier
        self.dtype = DTYPES[config.dtype]
        self.source = RowSource(config)
        self.norm = RowNorm(config, self.source, early_weights=True)
        self.output = RowOutput(config)
        #: Rows side by side, and of a thread.
        self.side = warps // config.warps
        of_group = -(-rows // self.side)
        batches = -(-of_group * config.shape.chunks // most)
        self.deep = -(-of_group // batches)
        #: Shared words that it needs: of two reductions.
        self.words = 2 * self.deep * warps

    @cute.jit
    def quantise(
        self,
        operands: Operands,
        own: OwnCodes,
        m: Int32,
        k: Int32,
        slabs: Int32,
        norm: Norm,
        thread: Int32,
    ):
        """All threads: codes and scales of all rows; visible to others after their next barrier.

        Each row's codes and scale also go to ``operands``, by one of the CTAs.

        Args:
            operands: x, weight, codes and scales are used.
            slabs: that are read; what is in them past k becomes 0.
            norm: 1 / k, and eps.
        """
        threads = self.config.shape.threads
        group, inner = thread // threads, thread % threads
        weights = self.norm.registers()
        if cutlass.const_expr(self.warps % self.config.warps):
            group = Int32(select_(group < self.side, group, m))
        batch = self.side * self.deep
        for number in cutlass.range(cute.ceil_div(m, batch), unroll=1):
            first = number * batch + group
            shape = (chunk_words(self.dtype), self.config.shape.chunks, self.deep)
            held = cute.make_rmem_tensor(shape, Int32)
            self.load(held, operands, first, m, k, inner)
            if cutlass.const_expr(self.config.op in NORMS):
                at_all = self.row(operands, Int32(0), m, k, inner)
                self.norm.load_weights(weights, operands, at_all, 0)
                self._normalise(held, weights, operands, own, first, m, k, norm, thread)
            self._write(held, operands, own, first, m, k, thread)
            if cutlass.const_expr(self.config.op not in NORMS and batch < self.rows):
                # The next rows' only words are these; a norm's first barrier does as much.
                cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARP_SIZE * self.warps)
        clear_past(own.address, self.rows, k, slabs, WARP_SIZE * self.warps, thread)

    @cute.jit
    def load(
        self,
        held: cute.Tensor,
        operands: Operands,
        first: Int32,
        m: Int32,
        k: Int32,
        inner: Int32,
    ):
        """A thread's chunks of its rows, the first of which is ``first``."""
        for i in cutlass.range_constexpr(self.deep):
            row = self.row(operands, first + i * self.side, m, k, inner)
            self.source.load(held[None, None, i], operands, row, 0, True)

    def row(self, operands: Operands, index: Int32, m: Int32, k: Int32, inner: Int32) -> Row:
        """A thread's place in a row. Python, run at trace time."""
        first = row_offset(operands.x, index, self.config.view)
        return Row(index, Boolean(index < m), inner, first, k)

    def _exchange(self, own: OwnCodes, reduction: int, thread: Int32) -> Exchange:
        """Of one reduction over all groups. Python, run at trace time."""
        words = cute.make_tensor(
            own.words.iterator + reduction * self.deep * self.warps,
            cute.make_layout((self.warps, self.deep)),
        )
        return Exchange(words, self.config.warps, self.warps, self.barrier, thread)

    @cute.jit
    def _normalise(
        self,
        held: cute.Tensor,
        weights: Any,
        operands: Operands,
        own: OwnCodes,
        first: Int32,
        m: Int32,
        k: Int32,
        norm: Norm,
        thread: Int32,
    ):
        """Rows in registers, in place."""
        inner = thread % self.config.shape.threads
        sums = cute.make_rmem_tensor(self.deep, Float32)
        for i in cutlass.range_constexpr(self.deep):
            row = self.row(operands, first + i * self.side, m, k, inner)
            sums[i] = self.norm.squares(held[None, None, i], row)
        all_sums(sums, self._exchange(own, 0, thread))
        for i in cutlass.range_constexpr(self.deep):
            row = self.row(operands, first + i * self.side, m, k, inner)
            rstd = cute.math.rsqrt(sums[i] * norm.inverse + norm.eps)
            of_row = Norm(Float32(0.0), rstd, norm.inverse, norm.eps, norm.offset)
            self.norm.normalise(held[None, None, i], weights, operands, row, 0, of_row)

    @cute.jit
    def _write(
        self,
        held: cute.Tensor,
        operands: Operands,
        own: OwnCodes,
        first: Int32,
        m: Int32,
        k: Int32,
        thread: Int32,
    ):
        """Quantise and store rows in registers."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        inner = thread % self.config.shape.threads
        amax = cute.make_rmem_tensor(self.deep, Int32)
        for i in cutlass.range_constexpr(self.deep):
            amax[i] = amax_bits(held[None, None, i], self.dtype)
        all_max(amax, self._exchange(own, 1, thread))
        for i in cutlass.range_constexpr(self.deep):
            row = self.row(operands, first + i * self.side, m, k, inner)
            scale = token_scale(amax[i], True)
            shared = row.index % ctas == cta
            if row.inside & (inner == 0):
                own.scales[row.index] = scale.bits.bitcast(Float32)
            if shared:
                self.output.write_token_scale(scale, operands, row)
            self.output.lift(held[None, None, i], scale)
            for j in cutlass.range_constexpr(self.config.shape.chunks):
                chunk, inside = chunk_of(row, 0, j, self.config.shape)
                if inside:
                    words = token_codes(widened(held[None, j, i], self.dtype), scale, True)
                    store_own(words, own.address, row.index, chunk, self.rows)
                    if shared:
                        offset = Int64(row.index) * operands.codes.stride[0] + chunk * CHUNK
                        store_codes(words, operands.codes, offset)


@cute.jit
def clear_past(
    address: Int32,
    rows: cutlass.Constexpr,
    k: Int32,
    slabs: Int32,
    threads: cutlass.Constexpr,
    thread: Int32,
):
    """Zeros to what is in the slabs past k: a weight's zeros there meet no NaN."""
    first = k // CHUNK
    count = slabs * (SLAB // CHUNK) - first
    zeros = cute.make_rmem_tensor(CHUNK // 4, Int32)
    zeros.fill(0)
    for i in cutlass.range(cute.ceil_div(count * rows - thread, threads), unroll=1):
        item = thread + i * threads
        store_own(zeros, address, item % rows, first + item // rows, rows)


@cute.jit
def store_own(
    words: cute.Tensor, address: Int32, row: Int32, chunk: Int32, rows: cutlass.Constexpr
):
    """8 codes, the ``chunk``-th of a row, into slabs with room for ``rows``."""
    chunks = SLAB // CHUNK
    line = address + (chunk // chunks * rows + row) * SLAB
    at = (chunk % chunks * CHUNK) ^ swizzle_bits(row, SLAB)
    pointer = cute.make_ptr(Int32, line + at, cute.AddressSpace.smem, assumed_align=CHUNK)
    cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(CHUNK // 4)))
