"""Rows of activations to e4m3 codes and scales, in one pass: what a GEMM of this package reads.

    quantize       x
    rmsnorm        x / rms(x) * (weight + offset), of x or of h = x + residual, which it writes
    layernorm      (x - mean(x)) / std(x) * weight + bias, likewise
    silu_mul, ...  act(gate) * up

The result, rounded to x's dtype, is quantised: per token (one fp32 scale a row) or as MXFP8 (one
e8m0 scale for every 32 of K). A row belongs to one warp, or to the warps of one CTA. Each thread
keeps its chunks of the row in registers between the passes, in x's dtype:

    load -> [row sums -> normalise] -> [row amax ->] scale -> codes

A row too long for that (``RowShape.streams``) is read again for every pass: it comes from L2.

Chunk c of a row is thread ``c % threads``'s number ``c / threads``. So a warp's accesses are
contiguous, and four neighbouring lanes hold one block of MXFP8. Chunks past the row's end are zeros
and are not stored; rows past the last have only such chunks. Every thread takes part in every
barrier and shuffle.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from .config import SCALE_BLOCK_ROWS, WARP_SIZE
from .e4m3 import TokenScale, token_scale
from .epilogue import DTYPES
from .row_arguments import fake_arguments
from .row_config import NORMS, RowConfig
from .row_inputs import row_offset
from .row_norm import RowNorm
from .row_output import RowOutput
from .row_parts import Norm, Operands, Row, panels_of
from .row_reduce import RowThreads, row_max
from .row_source import RowSource
from .row_values import amax_bits, chunk_words

#: Percent of a multiprocessor's L1 that is to be shared memory. Not left to the DSL, which would
#: ask a driver for it: a compilation needs none.
_CARVEOUT = 10


class RowQuantize:
    """One kernel, specialised by :class:`RowConfig`."""

    def __init__(self, config: RowConfig):
        self.config = config.check()
        self.dtype = DTYPES[config.dtype]
        self.source = RowSource(config)
        self.norm = RowNorm(config, self.source)
        self.output = RowOutput(config)
        self.has_norm = config.op in NORMS
        self.per_token = config.variant == "per_token"
        self.streams = config.shape.streams

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: Any,
        bias: Any,
        residual: Any,
        codes: cute.Tensor,
        scales: cute.Tensor,
        hidden: Any,
        kept: Any,
        eps: Float32,
        offset: Float32,
        stream: CUstream,
    ):
        """Launch on ``stream``; tensors as in ``fake_arguments``."""
        rows, k = codes.shape
        grid_rows = rows
        if cutlass.const_expr(self.config.blocked):
            # Padding is written too.
            grid_rows = cute.ceil_div(rows, SCALE_BLOCK_ROWS) * SCALE_BLOCK_ROWS
        inverse = Float32(1.0) / k.to(Float32)
        operands = Operands(x, weight, bias, residual, codes, scales, hidden, kept)
        shape = self.config.shape
        self.kernel(operands, rows, k, inverse, eps, offset).launch(
            grid=(cute.ceil_div(grid_rows, shape.rows), 1, 1),
            block=(shape.cta_threads, 1, 1),
            smem=self.config.smem_bytes,
            min_blocks_per_mp=self.config.ctas,
            preferred_smem_carveout=_CARVEOUT,
            use_pdl=self.config.pdl,
            stream=stream,
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        rows: Int32,
        k: Int32,
        inverse: Float32,
        eps: Float32,
        offset: Float32,
    ):
        if cutlass.const_expr(self.config.pdl):
            # Everything that is read may come from the kernel before, and everything that is
            # written may be read by it. The next kernel is let in only then: before, its CTAs
            # would take room that this one's own still need.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        row, threads = self._place(operands, rows, k)
        words = self._reduction_words()
        held = cute.make_rmem_tensor((chunk_words(self.dtype), self.config.shape.chunks), Int32)
        weights = self.norm.registers()
        norm = Norm(Float32(0.0), Float32(1.0), inverse, eps, offset)
        if cutlass.const_expr(not self.streams):
            self.source.load(held, operands, row, 0, True)
            self.norm.load_weights(weights, operands, row, 0)
        if cutlass.const_expr(self.has_norm):
            norm = self.norm.statistics(held, operands, row, threads, words, norm)
            if cutlass.const_expr(not self.streams):
                self.norm.normalise(held, weights, operands, row, 0, norm)
        scale = None
        if cutlass.const_expr(self.per_token):
            scale = self._token_scale(held, operands, row, threads, words, norm)
            self.output.write_token_scale(scale, operands, row)
        if cutlass.const_expr(self.streams):
            for panel in cutlass.range(panels_of(row, self.config.shape), unroll=1):
                self._read_again(held, operands, row, panel, norm)
                self.output.write(held, operands, row, panel, scale)
        else:
            self.output.write(held, operands, row, 0, scale)

    @cute.jit
    def _place(self, operands: Operands, rows: Int32, k: Int32):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        shape = self.config.shape
        in_cta, in_row = thread // shape.threads, thread % shape.threads
        index = cta * shape.rows + in_cta
        first = row_offset(operands.x, index, self.config.view)
        warps = self.config.warps
        threads = RowThreads(warps, in_cta * warps, in_row // WARP_SIZE, thread % WARP_SIZE)
        inside = index < rows
        if cutlass.const_expr(shape.rows == 1 and not self.config.blocked):
            inside = Boolean(True)
        if cutlass.const_expr(shape.full):
            k = Int32(shape.elements)
        return Row(index, inside, in_row, first, k), threads

    @cute.jit
    def _reduction_words(self):
        """Shared memory of the two sums and of the amax, as far as they are needed."""
        found = [None, None, None]
        if cutlass.const_expr(self.config.smem_bytes > 0):
            smem = SmemAllocator()
            count = self.config.warps * self.config.shape.rows
            needed = (self.has_norm, self.config.op == "layernorm", self.per_token)
            for i in cutlass.range_constexpr(3):
                if cutlass.const_expr(needed[i]):
                    found[i] = smem.allocate_tensor(Int32, cute.make_layout(count))
        return found

    @cute.jit
    def _read_again(
        self, held: cute.Tensor, operands: Operands, row: Row, panel: Int32, norm: Norm
    ):
        """A panel of a row that is not held, up to what is quantised."""
        self.source.load(held, operands, row, panel, False)
        if cutlass.const_expr(self.has_norm):
            weights = self.norm.registers()
            self.norm.load_weights(weights, operands, row, panel)
            self.norm.normalise(held, weights, operands, row, panel, norm)

    @cute.jit
    def _token_scale(
        self,
        held: cute.Tensor,
        operands: Operands,
        row: Row,
        threads: RowThreads,
        words: cutlass.Constexpr,
        norm: Norm,
    ) -> TokenScale:
        """The row's scale."""
        amax = Int32(0)
        if cutlass.const_expr(self.streams):
            for panel in cutlass.range(panels_of(row, self.config.shape), unroll=1):
                self._read_again(held, operands, row, panel, norm)
                amax = cutlass.max(amax, amax_bits(held, self.dtype))
        else:
            amax = amax_bits(held, self.dtype)
        return token_scale(row_max(amax, words[2], threads), self.dtype is not Float32)


def make(config: RowConfig, target: str) -> tuple[RowQuantize, list[object]]:
    """The kernel, the same for every target, and what to compile it with."""
    return RowQuantize(config), fake_arguments(config)
