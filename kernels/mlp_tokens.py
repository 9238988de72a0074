"""The tokens of the MLP kernel: normalised and quantised first, their products quantised between.

Of few tokens every CTA normalises all, and quantises all of the product, for itself. Of more, rows
are shared out among CTAs, and products are quantised by whoever computed them, when the largest
magnitude of every token is known to all.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .config import WARP_SIZE
from .e4m3 import token_codes, token_scale
from .epilogue import DTYPES
from .grid_barrier import load_word
from .mlp_announced import AnnouncedRows, Announcements
from .mlp_config import MMA_THREADS, MMA_WARPS, MlpConfig
from .mlp_parts import (
    MMA_BARRIER,
    Problem,
    Ring,
    Tensors,
    announced,
    steps_of,
    sync_mma_warps,
)
from .own_rows import OwnCodes, OwnRows
from .row_config import CHUNK
from .row_inputs import load_vector, store_codes
from .row_norm import RowNorm
from .row_output import RowOutput
from .row_parts import Norm, Operands, Row
from .row_reduce import RowThreads, row_max
from .row_source import RowSource
from .row_values import amax_bits, chunk_words, widened
from .weight_blocks import Span


class MlpTokens:
    """Specialised by :class:`MlpConfig`."""

    def __init__(self, config: MlpConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.source = RowSource(config.norm)
        self.norm = RowNorm(config.norm, self.source)
        self.output = RowOutput(config.norm)
        self.announcements = Announcements(config)
        if config.own[0]:
            self.own_norm = OwnRows(config.norm, config.rows, MMA_WARPS, MMA_BARRIER)
        if config.own[1]:
            self.own_product = AnnouncedRows(config.product, config.rows, MMA_WARPS, MMA_BARRIER)

    @cute.jit
    def normalise_own(self, tensors: Tensors, problem: Problem, ring: Ring, thread: Int32):
        """All MMA threads: codes and scales of all rows, to shared memory."""
        operands = Operands(
            tensors.x, tensors.norm, None, None, tensors.codes[0], tensors.scales[0], None, None
        )
        norm = Norm(Float32(0.0), Float32(1.0), problem.inverse, problem.eps, Float32(0.0))
        slabs = steps_of(problem.hidden, self.config.gate_up) * self.config.gate_up.slabs
        own = OwnCodes(ring.own, ring.scales[0], ring.words)
        self.own_norm.quantise(operands, own, problem.m, problem.hidden, slabs, norm, thread)
        sync_mma_warps()

    @cute.jit
    def quantise_own(self, tensors: Tensors, problem: Problem, ring: Ring, thread: Int32):
        """All MMA threads: the same of the product, as soon as it is announced.

        The codes before are not read any more when every warp has its part of the product.
        """
        pointer = cute.make_ptr(
            self.dtype, announced(tensors.workspace, 0), cute.AddressSpace.gmem, assumed_align=16
        )
        layout = cute.make_layout((problem.m, problem.ffn), stride=(problem.ffn, 1))
        x = cute.make_tensor(pointer, layout)
        operands = Operands(x, None, None, None, tensors.codes[1], tensors.scales[1], None, None)
        norm = Norm(Float32(0.0), Float32(1.0), problem.inverse, problem.eps, Float32(0.0))
        slabs = steps_of(problem.ffn, self.config.down) * self.config.down.slabs
        own = OwnCodes(ring.own, ring.scales[1], ring.words)
        self.own_product.quantise(operands, own, problem.m, problem.ffn, slabs, norm, thread)
        sync_mma_warps()

    @cute.jit
    def normalise(self, tensors: Tensors, problem: Problem, ring: Ring, thread: Int32):
        """All MMA threads: codes and scales of this CTA's rows."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        operands = Operands(
            tensors.x, tensors.norm, None, None, tensors.codes[0], tensors.scales[0], None, None
        )
        lane = thread % WARP_SIZE
        threads = RowThreads(MMA_WARPS, Int32(0), thread // WARP_SIZE, lane, MMA_BARRIER)
        rows = cute.ceil_div(problem.m - cta, ctas)
        for i in cutlass.range(rows, unroll=1):
            index = cta + i * ctas
            first = Int64(index) * tensors.x.stride[0]
            row = Row(index, index < problem.m, thread, first, problem.hidden)
            shape = (chunk_words(self.dtype), self.config.norm_shape.chunks)
            held = cute.make_rmem_tensor(shape, Int32)
            weights = self.norm.registers()
            norm = Norm(Float32(0.0), Float32(1.0), problem.inverse, problem.eps, Float32(0.0))
            self.source.load(held, operands, row, 0, True)
            self.norm.load_weights(weights, operands, row, 0)
            words = [
                cute.make_tensor(ring.words.iterator + i * MMA_WARPS, cute.make_layout(MMA_WARPS))
                for i in range(2)
            ]
            norm = self.norm.statistics(held, operands, row, threads, [words[0], None], norm)
            self.norm.normalise(held, weights, operands, row, 0, norm)
            amax = amax_bits(held, self.dtype)
            scale = token_scale(row_max(amax, words[1], threads), True)
            self.output.write_token_scale(scale, operands, row)
            self.output.write(held, operands, row, 0, scale)
            # The next row's words are these.
            sync_mma_warps()

    @cute.jit
    def fetch_scales(self, tensors: Tensors, problem: Problem, ring: Ring, lane: Int32):
        """One warp, when they are known: all tokens' scales, to shared memory.

        The MMA warps see them with the first stage, whose barrier this warp arrives on afterwards.
        """
        scales = tensors.scales[0]
        words = cute.recast_ptr(scales.iterator, dtype=Int32)
        for i in cutlass.range_constexpr(cute.ceil_div(self.config.tokens, WARP_SIZE)):
            token = lane + i * WARP_SIZE
            if token < problem.m:
                ring.scales[0][token] = load_word(words + token).bitcast(Float32)
        cute.arch.sync_warp()

    @cute.jit
    def quantise(self, tensors: Tensors, problem: Problem, ring: Ring, span: Span, thread: Int32):
        """All MMA threads, when the magnitudes are known: this CTA's columns of the product."""
        if thread < self.config.tokens:
            scale = token_scale(ring.amax[thread], True)
            ring.scales[1][thread] = scale.bits.bitcast(Float32)
            cta, _, _ = cute.arch.block_idx()
            if (thread < problem.m) & (cta == 0):
                tensors.scales[1][thread] = scale.bits.bitcast(Float32)
        # 8 channels of a token at a time: a block of gate and up.
        items = span.count * problem.m
        for i in cutlass.range(cute.ceil_div(items - thread, MMA_THREADS), unroll=1):
            item = thread + i * MMA_THREADS
            token, column = item // span.count, (span.first + item % span.count) * CHUNK
            words = cute.make_rmem_tensor(chunk_words(self.dtype), Int32)
            product, codes = tensors.product, tensors.codes[1]
            load_vector(words, product, Int64(token) * product.stride[0] + column)
            scale = token_scale(ring.amax[token], True)
            values = widened(words, self.dtype)
            for e in cutlass.range_constexpr(CHUNK):
                values[e] = values[e] * scale.lift
            packed = token_codes(values, scale, True)
            store_codes(packed, codes, Int64(token) * codes.stride[0] + column)
