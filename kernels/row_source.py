"""What a row kernel computes before any norm: x, x + residual, or act(gate) * up."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from .epilogue import DTYPES, activate
from .row_config import CHUNK, GATES, RowConfig
from .row_inputs import load_chunk, load_vector, store_vector
from .row_parts import Operands, Row, chunk_of
from .row_values import add, narrow, widened


class RowSource:
    """Loads the chunks of a thread."""

    def __init__(self, config: RowConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.gate = config.op.removesuffix("_mul") if config.op in GATES else None

    @cute.jit
    def load(
        self,
        held: cute.Tensor,
        operands: Operands,
        row: Row,
        panel: Int32,
        first_time: cutlass.Constexpr,
    ):
        """Fill ``held``: x, x + residual (written the first time) or act(gate) * up, rounded."""
        if cutlass.const_expr(not self.config.shape.full):
            held.fill(0)
        second = cute.make_rmem_tensor(held.layout, Int32)
        for i in cutlass.range_constexpr(self.config.shape.chunks):
            chunk, inside = chunk_of(row, panel, i, self.config.shape)
            if inside:
                self._load_one(held[None, i], second[None, i], operands, row, chunk)
        for i in cutlass.range_constexpr(self.config.shape.chunks):
            chunk, inside = chunk_of(row, panel, i, self.config.shape)
            if inside:
                self._combine(held[None, i], second[None, i])
                if cutlass.const_expr(self.config.residual and first_time):
                    offset = Int64(row.index) * operands.hidden.stride[0] + chunk * CHUNK
                    store_vector(held[None, i], operands.hidden, offset)

    @cute.jit
    def _load_one(
        self, chunk: cute.Tensor, second: cute.Tensor, operands: Operands, row: Row, number: Int32
    ):
        """Read a chunk of x, and of what goes with it: the residual, or up."""
        view = self.config.view
        column = number * CHUNK
        if cutlass.const_expr(self.gate is None):
            load_chunk(chunk, operands.x, row.first, column, view)
        elif cutlass.const_expr(self.config.interleaved):
            load_chunk(chunk, operands.x, row.first, 2 * column, view)
            load_chunk(second, operands.x, row.first, 2 * column + CHUNK, view)
        else:
            load_chunk(chunk, operands.x, row.first, column, view)
            load_chunk(second, operands.x, row.first, row.k + column, view)
        if cutlass.const_expr(self.config.residual):
            offset = Int64(row.index) * operands.residual.stride[0] + column
            load_vector(second, operands.residual, offset)

    @cute.jit
    def _combine(self, chunk: cute.Tensor, second: cute.Tensor):
        """``chunk + residual`` or ``act(chunk) * up``, in fp32 and rounded once."""
        if cutlass.const_expr(self.config.residual):
            add(chunk, second, self.dtype)
        elif cutlass.const_expr(self.gate is not None):
            values, others = widened(chunk, self.dtype), widened(second, self.dtype)
            for e in cutlass.range_constexpr(CHUNK):
                values[e] = activate(self.gate, values[e]) * others[e]
            narrow(chunk, values, self.dtype)
