"""How the CTAs of a grid that are resident together hear of each other, through global memory.

A *barrier* is a counter that is 0 before a launch. A CTA *arrives* once, and whoever *waits* goes
on when all have. What a CTA wrote before it arrived is seen by whoever has waited, through either
proxy: what TMA is to read needs a fence of proxies on both sides. That is three ways through L2,
one after another: what was written is there, the counter is, and then it is read.

Values that *announce themselves* need one: memory is 0 before a launch, no value is written as 0,
and whoever wants them reads until there is no 0. Each value stands for itself: no order among them
is needed, and none is had.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int16, Int32, Int64, cute
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
        "red.release.gpu.global.add.u32 [$0], 1;",
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


@dsl_user_op
def announce(address: Int64, word: Int32, *, loc: object = None, ip: object = None) -> None:
    """Write a word that is not 0, aligned to its size."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (address, word)]
    _asm("st.relaxed.gpu.global.b32 [$0], $1;", "l,r", operands, loc, ip)


@dsl_user_op
def announce_half(address: Int64, half: Int16, *, loc: object = None, ip: object = None) -> None:
    """Write 16 bits that are not 0."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (address, half)]
    _asm("st.relaxed.gpu.global.b16 [$0], $1;", "l,h", operands, loc, ip)


@dsl_user_op
def load_four_if(
    words: cute.Tensor,
    address: Int64,
    wanted: Int32,
    *,
    loc: object = None,
    ip: object = None,
) -> None:
    """If ``wanted`` is not 0: read four words, whose 16 bytes are aligned, from L2.

    Without a branch, so that several such loads are on their way together.
    """
    i32 = Int32.mlir_type
    operands = [address, wanted, *(words[i] for i in range(4))]
    found: Any = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 4),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, $5, 0;\n"
        "@wanted ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];\n}",
        "=r,=r,=r,=r,l,r,0,1,2,3,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
    for i in range(4):
        words[i] = Int32(llvm.extractvalue(i32, found, [i], loc=loc, ip=ip))


def missing_halves(words: cute.Tensor) -> Int32:
    """Not 0 if one of the 16-bit halves of four words is 0. Python, run at trace time."""
    found = Int32(0)
    for i in range(4):
        found = found | (words[i] - 0x00010001) & ~words[i]
    return found & -0x7FFF8000


def missing_signs(words: cute.Tensor) -> Int32:
    """Not 0 if one of four words has no sign bit. Python, run at trace time."""
    found = words[0]
    for i in range(1, 4):
        found = found & words[i]
    return ~found & -0x80000000
