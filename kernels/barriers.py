"""Waiting on mbarriers."""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def wait(barrier: cute.Pointer, phase: Int32, *, loc: object = None, ip: object = None) -> None:
    """Return once the barrier's phase of this parity has completed.

    The DSL's own wait gives a time-out hint, for which the compiler adds a second, slower loop.
    """
    llvm.inline_asm(
        None,
        [barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), phase.ir_value(loc=loc, ip=ip)],
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
        "@!done bra AGAIN;\n}",
        "r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
