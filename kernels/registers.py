"""Telling the compiler which values are worth a register."""

from __future__ import annotations

from cutlass import Int32, cute


def kept(value: int | Int32) -> Int32:
    """The value in a register of its own, which the compiler knows nothing about: a constant is not
    loaded anew in every loop, and what is worked out from it is no copy of what was before.
    """
    return Int32(cute.arch.prmt(Int32(value), Int32(0), Int32(0x3210)))
