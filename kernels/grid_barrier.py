"""Barriers among all CTAs of a grid that are resident together: counters in global memory.

A barrier is a counter that is 0 before a launch. A CTA *arrives* once, and whoever *waits* goes on
when all have. What a CTA wrote before it arrived is seen by whoever has waited, through either
proxy: what TMA is to read needs a fence of proxies on both sides.
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def _asm(text: str, constraints: str, operands: list, loc: object, ip: object) -> None:
    llvm.inline_asm(
        None,
        operands,
        text,
        ",".join(filter(None, (constraints, "~{memory}"))),
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def fence_proxies(*, loc: object = None, ip: object = None) -> None:
    """By every thread that wrote, before that barrier: what TMA is to read."""
    _asm("fence.proxy.async;", "", [], loc, ip)


@dsl_user_op
def arrive(counter: cute.Pointer, *, loc: object = None, ip: object = None) -> None:
    """By one thread, after a barrier of all threads whose writes are to be seen."""
    _asm(
        "fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [$0], 1;",
        "l",
        [counter.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        loc,
        ip,
    )


@dsl_user_op
def wait_for(
    counter: cute.Pointer, arrivals: Int32, *, loc: object = None, ip: object = None
) -> None:
    """Return once that many have arrived; by any number of threads."""
    address = counter.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    _asm(
        "{\n.reg .pred less;\n.reg .u32 seen;\nAGAIN:\n"
        "ld.acquire.gpu.global.u32 seen, [$0];\n"
        "setp.lt.u32 less, seen, $1;\n"
        "@less bra AGAIN;\nfence.proxy.async;\n}",
        "l,r",
        [address, arrivals.ir_value(loc=loc, ip=ip)],
        loc,
        ip,
    )


@dsl_user_op
def load_word(word: cute.Pointer, *, loc: object = None, ip: object = None) -> Int32:
    """A word that another CTA wrote: from L2, where this SM's L1 may hold an older one."""
    address = word.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [address],
            "ld.relaxed.gpu.global.s32 $0, [$1];",
            "=r,l,~{memory}",
            has_side_effects=True,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )
