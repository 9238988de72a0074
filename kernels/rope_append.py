"""From the rows of a fused q|k|v projection to what attention reads, in one launch.

    q       [RMSNorm of each head,] rotated; any strides: grouped by heads of keys, too
    k       likewise, into the cache's next slots
    v       copied there

Rotary embedding of halves: ``y = x * cos + rotate_half(x) * sin``, of which each product and the
sum are rounded to x's dtype, as Hugging Face's models do; the norm rounds before and after its
weight.

A thread has a chunk of 8 elements of a head's first half, and the one that it is rotated with, of
the second half. A head belongs to neighbouring lanes, as many as a power of two, of which the last
may have nothing to do. Every lane takes part in every shuffle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .arguments import ALIGNED, row_stride
from .epilogue import DTYPES
from .rope_config import THREADS, RopeConfig
from .row_config import CHUNK
from .row_inputs import load_vector, store_vector
from .row_values import add, chunk_words, narrow, widened


class RopeOperands(NamedTuple):
    """Global tensors; a part that the configuration leaves out is None."""

    qkv: cute.Tensor  # (tokens, (heads + 2 * kv heads) * d)
    cos: cute.Tensor  # (batch, sequence, d)
    sin: cute.Tensor
    q_norm: Any  # (d,)
    k_norm: Any
    q: cute.Tensor  # (batch, kv heads, sequence, heads of a group * d)
    k: cute.Tensor  # (batch, kv heads, sequence, d)
    v: Any


class Head(NamedTuple):
    """This thread's head: whether it has a part in it, its token, and what it is."""

    exists: cutlass.Boolean
    batch: Int32
    position: Int32  # in the sequence
    token: Int32
    number: Int32  # among those of q, k, v
    column: Int32  # of this thread's chunk


class RopeAppend:
    """One kernel, specialised by :class:`RopeConfig`."""

    def __init__(self, config: RopeConfig):
        self.config = config.check()
        self.dtype = DTYPES[config.dtype]
        self.half = config.head_dim // 2

    @cute.jit
    def __call__(
        self,
        qkv: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q_norm: Any,
        k_norm: Any,
        q: cute.Tensor,
        k: cute.Tensor,
        v: Any,
        eps: Float32,
        stream: CUstream,
    ):
        """Launch on ``stream``; tensors as in ``fake_arguments``."""
        kv_heads = k.shape[1]
        heads = kv_heads * (q.shape[3] // self.config.head_dim)
        each = heads + kv_heads * (2 if self.config.values else 1)
        operands = RopeOperands(qkv, cos, sin, q_norm, k_norm, q, k, v)
        self.kernel(operands, heads, kv_heads, each, eps).launch(
            grid=(cute.ceil_div(qkv.shape[0] * each, self.config.heads), 1, 1),
            block=(THREADS, 1, 1),
            use_pdl=self.config.pdl,
            stream=stream,
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self, operands: RopeOperands, heads: Int32, kv_heads: Int32, each: Int32, eps: Float32
    ):
        if cutlass.const_expr(self.config.pdl):
            # The projection is the kernel before; the cache may still be read by it.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        head = self._place(operands, each)
        words = chunk_words(self.dtype)
        low, high = (cute.make_rmem_tensor(words, Int32) for _ in range(2))
        low.fill(0)
        high.fill(0)
        if head.exists:
            first = Int64(head.token) * operands.qkv.stride[0]
            first = first + head.number * self.config.head_dim + head.column
            load_vector(low, operands.qkv, first)
            load_vector(high, operands.qkv, first + self.half)
        if cutlass.const_expr(self.config.norm):
            self._normalise(low, high, operands, head, heads, kv_heads, eps)
        if head.exists & (head.number < heads + kv_heads):
            self._rotate(low, high, operands, head)
        if head.exists:
            self._store(low, high, operands, head, heads, kv_heads)

    @cute.jit
    def _place(self, operands: RopeOperands, each: Int32) -> Head:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        group = self.config.group
        unit, chunk = cta * self.config.heads + thread // group, thread % group
        token, number = unit // each, unit % each
        sequence = operands.k.shape[2]
        exists = (token < operands.qkv.shape[0]) & (chunk < self.config.chunks)
        return Head(exists, token // sequence, token % sequence, token, number, chunk * CHUNK)

    @cute.jit
    def _normalise(
        self,
        low: cute.Tensor,
        high: cute.Tensor,
        operands: RopeOperands,
        head: Head,
        heads: Int32,
        kv_heads: Int32,
        eps: Float32,
    ):
        """RMSNorm of the head, but of values."""
        total = Float32(0.0)
        for part in (low, high):
            values = widened(part, self.dtype)
            for e in cutlass.range_constexpr(CHUNK):
                total = total + values[e] * values[e]
        for bit in cutlass.range_constexpr((self.config.group - 1).bit_length()):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << bit)
        rstd = cute.math.rsqrt(total * Float32(1.0 / self.config.head_dim) + eps)
        if head.exists & (head.number < heads):
            self._weight(low, operands.q_norm, rstd, head.column)
            self._weight(high, operands.q_norm, rstd, head.column + self.half)
        if head.exists & (head.number >= heads) & (head.number < heads + kv_heads):
            self._weight(low, operands.k_norm, rstd, head.column)
            self._weight(high, operands.k_norm, rstd, head.column + self.half)

    @cute.jit
    def _weight(self, words: cute.Tensor, weight: cute.Tensor, rstd: Float32, column: Int32):
        """``round(words * rstd) * weight``, rounded."""
        values = widened(words, self.dtype)
        for e in cutlass.range_constexpr(CHUNK):
            values[e] = values[e] * rstd
        narrow(words, values, self.dtype)
        factors = cute.make_rmem_tensor(chunk_words(self.dtype), Int32)
        load_vector(factors, weight, Int64(column))
        self._multiply(words, words, factors, False)

    @cute.jit
    def _rotate(self, low: cute.Tensor, high: cute.Tensor, operands: RopeOperands, head: Head):
        words = chunk_words(self.dtype)
        cos, sin, other = (cute.make_rmem_tensor((words, 2), Int32) for _ in range(3))
        for source, target in ((operands.cos, cos), (operands.sin, sin)):
            first = Int64(head.batch) * source.stride[0] + Int64(head.position) * source.stride[1]
            load_vector(target[None, 0], source, first + head.column)
            load_vector(target[None, 1], source, first + head.column + self.half)
        self._multiply(other[None, 0], high, sin[None, 0], True)
        self._multiply(other[None, 1], low, sin[None, 1], False)
        self._multiply(low, low, cos[None, 0], False)
        self._multiply(high, high, cos[None, 1], False)
        add(low, other[None, 0], self.dtype)
        add(high, other[None, 1], self.dtype)

    @cute.jit
    def _multiply(
        self,
        target: cute.Tensor,
        words: cute.Tensor,
        factors: cute.Tensor,
        negated: cutlass.Constexpr,
    ):
        """``target = words * factors``, rounded; or its negative. Products of 16 bits are exact in
        fp32 before.
        """
        values, others = widened(words, self.dtype), widened(factors, self.dtype)
        for e in cutlass.range_constexpr(CHUNK):
            product = values[e] * others[e]
            values[e] = -product if negated else product
        narrow(target, values, self.dtype)

    @cute.jit
    def _store(
        self,
        low: cute.Tensor,
        high: cute.Tensor,
        operands: RopeOperands,
        head: Head,
        heads: Int32,
        kv_heads: Int32,
    ):
        if head.number < heads:
            of_group = heads // kv_heads
            inner = head.number % of_group * self.config.head_dim
            self._append(low, high, operands.q, head, head.number // of_group, inner)
        elif head.number < heads + kv_heads:
            self._append(low, high, operands.k, head, head.number - heads, 0)
        elif cutlass.const_expr(self.config.values):
            number = head.number - heads - kv_heads
            self._append(low, high, operands.v, head, number, 0)

    @cute.jit
    def _append(
        self,
        low: cute.Tensor,
        high: cute.Tensor,
        target: cute.Tensor,
        head: Head,
        number: Int32,
        inner: Int32,
    ):
        """To a token's place under the ``number``-th head of keys, from ``inner`` on."""
        first = Int64(head.batch) * target.stride[0] + Int64(number) * target.stride[1]
        first = first + Int64(head.position) * target.stride[2] + inner + head.column
        store_vector(low, target, first)
        store_vector(high, target, first + self.half)


def fake_arguments(config: RopeConfig) -> list[object]:
    """Arguments to compile with: any sizes and strides, 16-byte aligned rows of elements."""
    dtype, d = DTYPES[config.dtype], config.head_dim
    tokens, batch, kv_heads, sequence = (cute.sym_int() for _ in range(4))

    def tensor(*shape: object) -> object:
        strides = [row_stride(dtype) for _ in shape[1:]]
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=ALIGNED)

    return [
        tensor(tokens, cute.sym_int(divisibility=CHUNK)),
        tensor(batch, sequence, d),
        tensor(batch, sequence, d),
        tensor(d) if config.norm else None,
        tensor(d) if config.norm else None,
        tensor(batch, kv_heads, sequence, cute.sym_int(divisibility=CHUNK)),
        tensor(batch, kv_heads, sequence, d),
        tensor(batch, kv_heads, sequence, d) if config.values else None,
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def make(config: RopeConfig, target: str) -> tuple[RopeAppend, list[object]]:
    """The kernel, the same for every target, and what to compile it with."""
    return RopeAppend(config), fake_arguments(config)
