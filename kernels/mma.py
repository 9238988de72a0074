"""The MMA seam: the one place that knows the tensor-core instruction.

``mma_m16n8k32`` multiplies one 16x32 tile of e4m3 codes of A by one 8x32 tile of B, scales the
product by one e8m0 scale per row of A and per column of B, and adds it to a 16x8 fp32 accumulator.
Two instructions serve it with the same register contract (PTX ISA, "Matrix multiply-accumulate
operation using mma instruction", fragments of ``m16n8k32`` with 8-bit types):

``BLOCK_SCALE``
    sm_120a, sm_121a. ``mma.sync ... kind::mxf8f6f4.block_scale`` (SASS ``QMMA.SF``). Fed *unit*
    scales, ue8m0 byte 127 for 2^0, it computes the plain e4m3 GEMM: GeForce runs the plain FP8 MMA
    with fp32 accumulation at half rate and this one at full rate, and the scales cost one constant.
``PLAIN``
    The *stand-in*: ``mma.sync ... f32.e4m3.e4m3.f32``, available from sm_89 on. It lets every other
    part of the sm_120 kernel (TMA, barriers, ``ldmatrix``, scale layouts, epilogue) run on a Hopper
    GPU. Scales are applied to its product, each fetched by a warp shuffle from the lane and byte
    from which the PTX ISA says that the hardware reads it.

Where scales are read (``scale_vec::1X``). Each lane holds a 32-bit register of four scales for A
and one for B; ``byte_id`` picks the byte. A's row r (0-7) is scaled from lane ``4r + 2 *
thread_id_a``, its row r + 8 from the lane after; B's column c from lane ``4c + thread_id_b``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Float64, Int16, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op, select_

from .floats import E8M0_BIAS, E8M0_NAN

#: Four ue8m0 bytes of 127: 2^0 in every byte, whichever one the selector picks.
UNIT_SCALES = 0x7F7F7F7F
_FP64_BIAS, _FP64_MANTISSA, _FP64_NAN = 1023, 52, 0x7FF8 << 48


class Instruction(Enum):
    """Which instruction ``mma_m16n8k32`` emits."""

    BLOCK_SCALE = "block_scale"
    PLAIN = "plain"

    @staticmethod
    def of(target: str) -> Instruction:
        """The instruction of a compile target such as ``sm_120a``.

        Raises:
            ValueError: a target for which this kernel is not meant.
        """
        if target.startswith("sm_12"):
            return Instruction.BLOCK_SCALE
        if target == "sm_90a":
            return Instruction.PLAIN
        raise ValueError(f"target: got {target!r}, must be of the sm_12x family, or sm_90a")


class Selected(NamedTuple):
    """A register of four scales, and which of its bytes, of which lanes, an MMA reads."""

    word: Int32
    byte_id: int
    thread_id: int


_PTX = {
    Instruction.BLOCK_SCALE: (
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
        ".f32.e4m3.e4m3.f32.ue8m0 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}, "
        "$14, {$15, $16}, $17, {$18, $19};"
    ),
    Instruction.PLAIN: (
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    ),
}
_CONSTRAINTS = {
    Instruction.BLOCK_SCALE: "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f,r,h,h,r,h,h",
    Instruction.PLAIN: "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
}


def scales_a(instruction: Instruction, selected: Selected) -> Any:
    """A's scales as ``mma_m16n8k32`` takes them: of rows ``lane/4`` and ``lane/4 + 8``."""
    if instruction is Instruction.BLOCK_SCALE:
        return selected
    lane = cute.arch.lane_idx() // 4 * 4 + 2 * selected.thread_id
    return _factor(selected, lane), _factor(selected, lane + 1)


def scales_b(instruction: Instruction, selected: Selected) -> Any:
    """B's scales: of columns ``2*(lane%4)`` and the next."""
    if instruction is Instruction.BLOCK_SCALE:
        return selected
    lane = cute.arch.lane_idx() % 4 * 8 + selected.thread_id
    return _factor(selected, lane), _factor(selected, lane + 4)


def unit_scales(instruction: Instruction, word: Int32) -> Any:
    """Scales of 1 for either operand, from a word of ``UNIT_SCALES``."""
    return Selected(word, 0, 0) if instruction is Instruction.BLOCK_SCALE else None


@cute.jit
def mma_m16n8k32(
    instruction: cutlass.Constexpr,
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    scale_a: Any,
    scale_b: Any,
):
    """``c += (a * scale_a) @ (b * scale_b).T`` for one warp.

    Args:
        instruction: what to emit; a trace-time constant.
        a: 16 e4m3 codes per lane in registers: rows ``lane/4`` and ``lane/4 + 8``, K halves 0 and
            1, in the order (row, half) = (0,0), (8,0), (0,1), (8,1) of 4 codes each, as one
            ``ldmatrix.x4`` leaves them.
        b: 8 codes per lane: column ``lane/4``, K halves 0 and 1.
        c: 4 fp32 per lane: rows ``lane/4`` and ``lane/4 + 8``, columns ``2*(lane%4)`` and the next.
        scale_a, scale_b: from ``scales_a`` and ``scales_b``, or ``unit_scales``.
    """
    if cutlass.const_expr(instruction is Instruction.BLOCK_SCALE):
        _emit(instruction, a, b, c, c, scale_a, scale_b)
    elif cutlass.const_expr(scale_a is None):
        _emit(instruction, a, b, c, c, None, None)
    else:
        product = cute.make_rmem_tensor(4, Float32)
        product.fill(0.0)
        _emit(instruction, a, b, product, product, None, None)
        for half in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                # In fp64, whose range holds the product of any two scales: exact until rounded.
                scaled = product[2 * half + e].to(Float64) * (scale_a[half] * scale_b[e])
                c[2 * half + e] = c[2 * half + e] + scaled.to(Float32)


@cute.jit
def prepared(instruction: cutlass.Constexpr, codes: cute.Tensor) -> cute.Tensor:
    """A fragment of codes as ``mma_prepared`` takes it, for as many MMAs as it is part of.

    Where the tensor core knows no e4m3 (Hopper's, by ``mma.sync``) that is fp16, which every MMA
    would make anew of both its operands.
    """
    if cutlass.const_expr(instruction is Instruction.BLOCK_SCALE):
        return codes
    words = cute.recast_tensor(codes, Int32)
    made = cute.make_rmem_tensor(2 * cute.size(words), Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        made[2 * i], made[2 * i + 1] = _as_halves(words[i])
    return made


@cute.jit
def mma_prepared(
    instruction: cutlass.Constexpr, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, unit: Any
):
    """``mma_m16n8k32`` of fragments that are ``prepared``, without scales.

    Of fp16 two instructions, each with 4 neighbouring codes of K of every lane: which of K's
    elements is which does not matter, as long as A and B agree.
    """
    if cutlass.const_expr(instruction is Instruction.BLOCK_SCALE):
        _emit(instruction, a, b, c, c, unit, unit)
    else:
        for half in cutlass.range_constexpr(2):
            rows = [a[4 * half + i] for i in (0, 2, 1, 3)]
            _emit_halves(rows, [b[2 * half], b[2 * half + 1]], c)


@dsl_user_op
def _as_halves(word: Int32, *, loc: object = None, ip: object = None) -> tuple[Int32, Int32]:
    """Four codes as two pairs of fp16."""
    i32 = Int32.mlir_type
    result = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 2),
        [word.ir_value(loc=loc, ip=ip)],
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 $0, low;\ncvt.rn.f16x2.e4m3x2 $1, high;\n}",
        "=r,=r,r",
        has_side_effects=False,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
    low, high = (llvm.extractvalue(i32, result, [i], loc=loc, ip=ip) for i in range(2))
    return Int32(low), Int32(high)


@dsl_user_op
def _emit_halves(
    a: list[Int32], b: list[Int32], c: cute.Tensor, *, loc: object = None, ip: object = None
) -> None:
    """``c += a @ b.T`` of fp16, K of 16."""
    f32 = Float32.mlir_type
    operands = [*a, *b, *(c[i] for i in range(4))]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        _CONSTRAINTS[Instruction.PLAIN],
        # The whole warp takes part: it must not be moved under a condition or duplicated.
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
    for i in range(4):
        c[i] = Float32(llvm.extractvalue(f32, result, [i], loc=loc, ip=ip))


@dsl_user_op
def _emit(
    instruction: Instruction,
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    d: cute.Tensor,
    scale_a: Selected | None,
    scale_b: Selected | None,
    *,
    loc: object = None,
    ip: object = None,
) -> None:
    """``d = c + a @ b.T`` by one instruction."""
    words_a = cute.recast_tensor(a, Int32, loc=loc, ip=ip)
    words_b = cute.recast_tensor(b, Int32, loc=loc, ip=ip)
    operands = [words_a[i] for i in range(4)] + [words_b[i] for i in range(2)]
    operands += [c[i] for i in range(4)]
    for scale in (scale_a, scale_b):
        if scale is not None:
            operands += [scale.word, Int16(scale.byte_id), Int16(scale.thread_id)]
    f32 = Float32.mlir_type
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        _PTX[instruction],
        _CONSTRAINTS[instruction],
        # The whole warp takes part: it must not be moved under a condition or duplicated.
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
    for i in range(4):
        d[i] = Float32(llvm.extractvalue(f32, result, [i], loc=loc, ip=ip))


def _factor(selected: Selected, lane: Int32) -> Float64:
    """The scale that the hardware would read from ``lane``, by its bits."""
    word = cute.arch.shuffle_sync(selected.word, lane)
    byte = (word >> (8 * selected.byte_id)) & 0xFF
    bits = (byte + (_FP64_BIAS - E8M0_BIAS)).to(Int64) << _FP64_MANTISSA
    bits = Int64(select_(byte == E8M0_NAN, Int64(_FP64_NAN), bits))
    return Float64(llvm.bitcast(Float64.mlir_type, bits.ir_value()))
