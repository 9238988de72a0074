"""What a row kernel writes: codes, scales of rows or blocks, and what they were made of."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, cute
from cutlass.cutlass_dsl import select_

from .config import MX_BLOCK
from .e4m3 import LOWER_PAIR, TokenScale, block_codes, block_scale, token_codes
from .epilogue import DTYPES
from .mx_output import scale_offset
from .row_config import CHUNK, RowConfig
from .row_inputs import store_codes, store_vector
from .row_parts import Operands, Row, chunk_of
from .row_values import amax_bits, chunk_words, multiply, widened

#: Chunks that share an e8m0 scale, in neighbouring lanes; scales in a 32-bit word.
_BLOCK_CHUNKS, _WORD_SCALES = MX_BLOCK // CHUNK, 4


class RowOutput:
    """Quantises and stores the chunks of a thread."""

    def __init__(self, config: RowConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.per_token = config.variant == "per_token"
        self.narrow = config.dtype != "float32"

    @cute.jit
    def write_token_scale(self, scale: TokenScale, operands: Operands, row: Row):
        """By the row's first thread."""
        if row.inside & (row.thread == 0):
            pointer = cute.recast_ptr(operands.scales.iterator, dtype=Int32)
            bits = cute.make_tensor(pointer, operands.scales.layout)
            bits[row.index] = scale.bits

    @cute.jit
    def write(self, held: cute.Tensor, operands: Operands, row: Row, panel: Int32, scale: Any):
        """Codes, scales of blocks, and what is quantised if it is wanted; overwrites ``held``."""
        if cutlass.const_expr(self.config.keep):
            self._write_kept(held, operands, row, panel)
        if cutlass.const_expr(self.per_token):
            self.lift(held, scale)
        for i in cutlass.range_constexpr(self.config.shape.chunks):
            chunk, inside = chunk_of(row, panel, i, self.config.shape)
            values = widened(held[None, i], self.dtype)
            block = None
            if cutlass.const_expr(not self.per_token):
                block = block_scale(self._block_amax(held[None, i]))
                self._write_block_scale(block.byte, operands, row, chunk, inside)
            if inside:
                if cutlass.const_expr(self.per_token):
                    words = token_codes(values, scale, self.narrow)
                else:
                    words = block_codes(values, block)
                offset = Int64(row.index) * operands.codes.stride[0] + chunk * CHUNK
                store_codes(words, operands.codes, offset)

    @cute.jit
    def _write_kept(self, held: cute.Tensor, operands: Operands, row: Row, panel: Int32):
        for i in cutlass.range_constexpr(self.config.shape.chunks):
            chunk, inside = chunk_of(row, panel, i, self.config.shape)
            if inside:
                offset = Int64(row.index) * operands.kept.stride[0] + chunk * CHUNK
                store_vector(held[None, i], operands.kept, offset)

    @cute.jit
    def lift(self, held: cute.Tensor, scale: TokenScale):
        """Multiply by the power of two of rows whose scale is huge: exact where a code is not 0."""
        if cutlass.const_expr(self.dtype is BFloat16):
            if scale.lift != Float32(1.0):
                factors = cute.make_rmem_tensor(chunk_words(self.dtype), Int32)
                factors.fill(LOWER_PAIR)
                for i in cutlass.range_constexpr(self.config.shape.chunks):
                    multiply(held[None, i], factors, self.dtype)

    @cute.jit
    def _block_amax(self, chunk: cute.Tensor) -> Int32:
        """Of the 32 elements that four neighbouring lanes hold."""
        amax = amax_bits(chunk, self.dtype)
        for bit in cutlass.range_constexpr(2):
            amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, 1 << bit))
        return amax

    @cute.jit
    def _write_block_scale(
        self, byte: Int32, operands: Operands, row: Row, chunk: Int32, inside: Boolean
    ):
        """By one lane of those that share it, or that share a word of them."""
        number = chunk // _BLOCK_CHUNKS
        if cutlass.const_expr(self.config.blocked):
            # The four scales of a row of a 128x4 block are one word; past the ends it holds zeros.
            word = Int32(select_(inside, byte, Int32(0))) << (8 * (number % _WORD_SCALES))
            for bit in cutlass.range_constexpr(2):
                word = word | cute.arch.shuffle_sync_bfly(word, _BLOCK_CHUNKS << bit)
            columns = cute.ceil_div(row.k, MX_BLOCK * _WORD_SCALES)
            first = chunk % (_BLOCK_CHUNKS * _WORD_SCALES) == 0
            if first & (number // _WORD_SCALES < columns):
                offset = scale_offset(row.index, number, columns) // _WORD_SCALES
                pointer = cute.recast_ptr(operands.scales.iterator, dtype=Int32)
                cute.make_tensor(pointer + offset, cute.make_layout(1))[0] = word
        elif inside & (chunk % _BLOCK_CHUNKS == 0):
            pointer = cute.recast_ptr(operands.scales.iterator, dtype=Uint8)
            scales = cute.make_tensor(pointer, operands.scales.layout)
            scales[row.index, number] = byte.to(Uint8)
