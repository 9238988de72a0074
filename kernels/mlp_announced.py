"""What the CTAs of the MLP kernel announce to each other: words that are 0 until they are there.

Of few tokens that is the product itself, which every CTA quantises for itself; of more the largest
magnitude of each CTA's part of every token. The last CTA to go leaves zeros.

What may be 0 is announced with all its bits inverted: a product, for no conversion makes the NaN of
only ones; and magnitudes, which have no sign.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cutlass_dsl import select_

from .config import WARP_SIZE
from .floats import bits_of_half
from .grid_barrier import (
    announce,
    announce_half,
    load_four_if,
    missing_halves,
    missing_signs,
)
from .mlp_config import MMA_THREADS, MlpConfig
from .mlp_parts import Problem, Ring, announced
from .own_rows import OwnRows
from .row_config import CHUNK
from .row_parts import Operands, chunk_of

#: Words, and halves of words, that are read at a time.
_WORDS = 4
#: Such reads that are on their way together.
_TOGETHER = 4


@cute.jit
def announce_product(workspace: cute.Tensor, number: Int32, value: cute.Numeric):
    """A value of 16 bits, the ``number``-th of all.

    With all bits inverted: only a NaN that no conversion makes would be 0.
    """
    announce_half(announced(workspace, 2 * number), ~bits_of_half(value))


class AnnouncedRows(OwnRows):
    """Rows that are not there yet when they are wanted: ``operands.x`` is what is announced."""

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
        """All of a thread's chunks together, and again those that are not there, until all are."""
        held.fill(0)
        missing = Int32(1)
        while missing != 0:
            self._ask(held, operands, first, m, k, inner)
            missing = self._missing(held, operands, first, m, k, inner)
        for i in cutlass.range_constexpr(self.deep):
            row = self.row(operands, first + i * self.side, m, k, inner)
            for j in cutlass.range_constexpr(self.config.shape.chunks):
                _, inside = chunk_of(row, 0, j, self.config.shape)
                inverted = Int32(select_(inside, Int32(-1), Int32(0)))
                for e in cutlass.range_constexpr(_WORDS):
                    held[e, j, i] = held[e, j, i] ^ inverted

    @cute.jit
    def _ask(
        self, held: cute.Tensor, operands: Operands, first: Int32, m: Int32, k: Int32, inner: Int32
    ):
        for i in cutlass.range_constexpr(self.deep):
            row = self.row(operands, first + i * self.side, m, k, inner)
            for j in cutlass.range_constexpr(self.config.shape.chunks):
                chunk, inside = chunk_of(row, 0, j, self.config.shape)
                words = held[None, j, i]
                wanted = Int32(select_(inside, missing_halves(words), Int32(0)))
                source = operands.x.iterator + (row.first + chunk * CHUNK)
                load_four_if(words, source.toint(), wanted)

    @cute.jit
    def _missing(
        self, held: cute.Tensor, operands: Operands, first: Int32, m: Int32, k: Int32, inner: Int32
    ) -> Int32:
        missing = Int32(0)
        for i in cutlass.range_constexpr(self.deep):
            row = self.row(operands, first + i * self.side, m, k, inner)
            for j in cutlass.range_constexpr(self.config.shape.chunks):
                _, inside = chunk_of(row, 0, j, self.config.shape)
                words = missing_halves(held[None, j, i])
                missing = missing | Int32(select_(inside, words, Int32(0)))
        return missing


class Announcements:
    """Specialised by :class:`MlpConfig`."""

    def __init__(self, config: MlpConfig):
        self.config = config

    @cute.jit
    def magnitudes(self, workspace: cute.Tensor, ring: Ring, thread: Int32):
        """This CTA's, of every token."""
        cta, _, _ = cute.arch.block_idx()
        if thread < self.config.tokens:
            address = announced(workspace, 4 * (cta * self.config.tokens + thread))
            announce(address, ~ring.amax[thread])

    @cute.jit
    def gather_magnitudes(self, workspace: cute.Tensor, ring: Ring, thread: Int32):
        """All CTAs' into ``ring.amax``, where this one's are; by all MMA threads."""
        ctas, _, _ = cute.arch.grid_dim()
        most = cute.make_rmem_tensor(_WORDS, Int32)
        most.fill(0)
        count = ctas * self.config.tokens // _WORDS
        batch = MMA_THREADS * _TOGETHER
        for i in cutlass.range(cute.ceil_div(count - thread, batch), unroll=1):
            words = cute.make_rmem_tensor((_WORDS, _TOGETHER), Int32)
            self._read(words, workspace, thread + i * batch, count)
            for j in cutlass.range_constexpr(_TOGETHER):
                for e in cutlass.range_constexpr(_WORDS):
                    most[e] = cutlass.max(most[e], ~words[e, j])
        # Every so many threads have the same tokens.
        period, lane = self.config.tokens // _WORDS, thread % WARP_SIZE
        for e in cutlass.range_constexpr(_WORDS):
            value = most[e]
            for bit in cutlass.range_constexpr(period.bit_length() - 1, 5):
                value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, 1 << bit))
            if lane < period:
                word = ring.amax.iterator + (lane * _WORDS + e)
                cute.arch.atomic_max(word, value, sem="relaxed", scope="cta")

    @cute.jit
    def _read(self, words: cute.Tensor, workspace: cute.Tensor, first: Int32, count: Int32):
        """Several times four words, and again those that miss some; past ``count`` all ones."""
        words.fill(0)
        for j in cutlass.range_constexpr(_TOGETHER):
            if first + j * MMA_THREADS >= count:
                words[None, j].fill(-1)
        missing = Int32(1)
        while missing != 0:
            missing = self._ask(words, workspace, first)

    @cute.jit
    def _ask(self, words: cute.Tensor, workspace: cute.Tensor, first: Int32) -> Int32:
        for j in cutlass.range_constexpr(_TOGETHER):
            address = announced(workspace, 4 * _WORDS * (first + j * MMA_THREADS))
            load_four_if(words[None, j], address, missing_signs(words[None, j]))
        missing = Int32(0)
        for j in cutlass.range_constexpr(_TOGETHER):
            missing = missing | missing_signs(words[None, j])
        return missing

    @cute.jit
    def clear(self, workspace: cute.Tensor, problem: Problem, lane: Int32):
        """Zeros to all that was announced; by one warp of the grid."""
        ctas, _, _ = cute.arch.grid_dim()
        zeros = cute.make_rmem_tensor(_WORDS, Int32)
        zeros.fill(0)
        count = ctas * self.config.tokens
        if cutlass.const_expr(self.config.own[1] > 0):
            count = problem.m * problem.ffn // 2
        for i in cutlass.range(cute.ceil_div(count - lane * _WORDS, WARP_SIZE * _WORDS), unroll=4):
            address = announced(workspace, 4 * _WORDS * (lane + i * WARP_SIZE))
            pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(_WORDS)))
