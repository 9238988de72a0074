"""The MMA seam: the one place that knows the tensor-core instruction.

``mma_m16n8k32`` multiplies one 16x32 tile of e4m3 codes of A by one 8x32 tile of B and adds to a
16x8 fp32 accumulator. Two instructions serve it with the same register contract (PTX ISA, "Matrix
multiply-accumulate operation using mma instruction", fragments of ``m16n8k32`` with 8-bit types):

``BLOCK_SCALE``
    sm_120a, sm_121a. ``mma.sync ... kind::mxf8f6f4.block_scale`` (SASS ``QMMA.SF``), fed *unit*
    scales: ue8m0 byte 127 is 2^0, so the product is the plain e4m3 GEMM. GeForce runs the plain FP8
    MMA with fp32 accumulation at half rate and this one at full rate; the scales cost one constant
    register.
``PLAIN``
    The *stand-in*: ``mma.sync ... f32.e4m3.e4m3.f32``, available from sm_89 on. It lets every other
    part of the sm_120 kernel (TMA, barriers, ``ldmatrix``, epilogue) run on a Hopper GPU.
"""

from __future__ import annotations

from enum import Enum

import cutlass
from cutlass import Int16, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

#: Four ue8m0 bytes of 127: 2^0 in every byte, whichever one the selector picks.
UNIT_SCALES = 0x7F7F7F7F


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


@dsl_user_op
def mma_m16n8k32(
    instruction: Instruction,
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    *,
    loc: object = None,
    ip: object = None,
) -> None:
    """``c += a @ b.T`` for one warp, with unit scales.

    Args:
        instruction: what to emit; a trace-time constant.
        a: 16 e4m3 codes per lane in registers: rows ``lane/4`` and ``lane/4 + 8``, K halves 0 and
            1, in the order (row, half) = (0,0), (8,0), (0,1), (8,1) of 4 codes each, as one
            ``ldmatrix.x4`` leaves them.
        b: 8 codes per lane: column ``lane/4``, K halves 0 and 1.
        c: 4 fp32 per lane: rows ``lane/4`` and ``lane/4 + 8``, columns ``2*(lane%4)`` and the next.
    """
    words_a = cute.recast_tensor(a, Int32, loc=loc, ip=ip)
    words_b = cute.recast_tensor(b, Int32, loc=loc, ip=ip)
    operands = [words_a[i] for i in range(4)] + [words_b[i] for i in range(2)]
    operands += [c[i] for i in range(4)]
    if instruction is Instruction.BLOCK_SCALE:
        # scale register, {byte-id, thread-id} of A, then of B: with unit scales any selector reads
        # 2^0.
        operands += [Int32(UNIT_SCALES), Int16(0), Int16(0)] * 2
    f32 = cutlass.Float32.mlir_type
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
        c[i] = cutlass.Float32(llvm.extractvalue(f32, result, [i], loc=loc, ip=ip))
