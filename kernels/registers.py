"""Telling the compiler which values are worth a register."""

from __future__ import annotations

from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def kept(value: int | Int32, *, loc: object = None, ip: object = None) -> Int32:
    """The value in a register of its own, which the compiler knows nothing about: a constant is not
    loaded anew in every loop, and what is worked out from it is no copy of what was before.
    """
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [Int32(value).ir_value(loc=loc, ip=ip)],
            "mov.b32 $0, $1;",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )
