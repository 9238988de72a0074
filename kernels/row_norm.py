"""A row kernel's norm: the row's statistics, and what is made of its chunks with them."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import select_

from .epilogue import DTYPES
from .row_config import CHUNK, NORMS, RowConfig
from .row_inputs import load_vector
from .row_parts import Norm, Operands, Row, chunk_of, panels_of
from .row_reduce import RowThreads, row_sum
from .row_source import RowSource
from .row_values import chunk_words, multiply, narrow, widened


class RowNorm:
    """RMSNorm or LayerNorm; nothing where there is none.

    ``early_weights``: load them together with x; by default where there are registers for it.
    """

    def __init__(self, config: RowConfig, source: RowSource, early_weights: bool | None = None):
        self.config, self.source = config, source
        self.dtype = DTYPES[config.dtype]
        self.weight, self.bias = (DTYPES.get(name or "") for name in (config.weight, config.bias))
        few = config.shape.chunks <= 2 if early_weights is None else early_weights
        self.early_weights = config.op in NORMS and few
        self.streams = config.shape.streams

    @cute.jit
    def registers(self) -> Any:
        """Room for the weights of this thread's chunks, if they are loaded early."""
        weights = None
        if cutlass.const_expr(self.early_weights):
            chunks = self.config.shape.chunks
            weights = cute.make_rmem_tensor((chunk_words(self.weight), chunks), Int32)
        return weights

    @cute.jit
    def load_weights(self, weights: Any, operands: Operands, row: Row, panel: Int32):
        """A norm's weights for this thread's chunks."""
        if cutlass.const_expr(self.early_weights):
            for i in cutlass.range_constexpr(self.config.shape.chunks):
                chunk, inside = chunk_of(row, panel, i, self.config.shape)
                if inside:
                    load_vector(weights[None, i], operands.weight, Int64(chunk * CHUNK))

    @cute.jit
    def statistics(
        self,
        held: cute.Tensor,
        operands: Operands,
        row: Row,
        threads: RowThreads,
        words: cutlass.Constexpr,
        norm: Norm,
    ) -> Norm:
        """The row's mean (0 for RMSNorm) and ``1 / sqrt(mean((x - mean)^2) + eps)``."""
        mean = Float32(0.0)
        if cutlass.const_expr(self.config.op == "layernorm"):
            total = self._sum(held, operands, row, mean, False)
            mean = row_sum(total, words[1], threads) * norm.inverse
        total = self._sum(held, operands, row, mean, True)
        variance = row_sum(total, words[0], threads) * norm.inverse
        rstd = cute.math.rsqrt(variance + norm.eps)
        return Norm(mean, rstd, norm.inverse, norm.eps, norm.offset)

    @cute.jit
    def _sum(
        self,
        held: cute.Tensor,
        operands: Operands,
        row: Row,
        mean: Float32,
        squares: cutlass.Constexpr,
    ) -> Float32:
        """This thread's part of the sum of x, or of the squares of ``x - mean``."""
        total = Float32(0.0)
        if cutlass.const_expr(self.streams):
            for panel in cutlass.range(panels_of(row, self.config.shape), unroll=1):
                self.source.load(held, operands, row, panel, squares)
                total = total + self._panel_sum(held, row, panel, mean, squares)
        else:
            total = self._panel_sum(held, row, 0, mean, squares)
        return total

    @cute.jit
    def squares(self, held: cute.Tensor, row: Row) -> Float32:
        """This thread's part of the sum of squares of a row that is held."""
        return self._panel_sum(held, row, 0, Float32(0.0), True)

    @cute.jit
    def _panel_sum(
        self,
        held: cute.Tensor,
        row: Row,
        panel: Int32,
        mean: Float32,
        squares: cutlass.Constexpr,
    ) -> Float32:
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.config.shape.chunks):
            values = widened(held[None, i], self.dtype)
            part = Float32(0.0)
            for e in cutlass.range_constexpr(CHUNK):
                if cutlass.const_expr(squares):
                    difference = values[e] - mean
                    part = part + difference * difference
                else:
                    part = part + values[e]
            _, inside = chunk_of(row, panel, i, self.config.shape)
            total = total + Float32(select_(inside, part, Float32(0.0)))
        return total

    @cute.jit
    def normalise(
        self,
        held: cute.Tensor,
        weights: Any,
        operands: Operands,
        row: Row,
        panel: Int32,
        norm: Norm,
    ):
        """``held`` normalised, weighted and rounded, in place."""
        for i in cutlass.range_constexpr(self.config.shape.chunks):
            chunk, inside = chunk_of(row, panel, i, self.config.shape)
            if inside:
                values = widened(held[None, i], self.dtype)
                for e in cutlass.range_constexpr(CHUNK):
                    if cutlass.const_expr(self.config.op == "layernorm"):
                        values[e] = values[e] - norm.mean
                    values[e] = values[e] * norm.rstd
                if cutlass.const_expr(self.early_weights):
                    factors = weights[None, i]
                else:
                    factors = cute.make_rmem_tensor(chunk_words(self.weight), Int32)
                    load_vector(factors, operands.weight, Int64(chunk * CHUNK))
                self._weight(held[None, i], values, factors, operands, chunk, norm)

    @cute.jit
    def _weight(
        self,
        held: cute.Tensor,
        values: cute.Tensor,
        factors: cute.Tensor,
        operands: Operands,
        chunk: Int32,
        norm: Norm,
    ):
        """``values * (weight + offset) + bias``, rounded into ``held``."""
        if cutlass.const_expr(self.config.round_twice):
            narrow(held, values, self.dtype)
        if cutlass.const_expr(self.config.round_twice and self.weight is self.dtype):
            multiply(held, factors, self.dtype)
        else:
            if cutlass.const_expr(self.config.round_twice):
                values = widened(held, self.dtype)
            weight = widened(factors, self.weight)
            for e in cutlass.range_constexpr(CHUNK):
                if cutlass.const_expr(self.config.offset):
                    weight[e] = weight[e] + norm.offset
                values[e] = values[e] * weight[e]
            if cutlass.const_expr(self.bias is not None):
                words = cute.make_rmem_tensor(chunk_words(self.bias), Int32)
                load_vector(words, operands.bias, Int64(chunk * CHUNK))
                bias = widened(words, self.bias)
                for e in cutlass.range_constexpr(CHUNK):
                    values[e] = values[e] + bias[e]
            narrow(held, values, self.dtype)
