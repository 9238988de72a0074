"""Split-K inside a cluster: its CTAs swap parts of their sums through each other's shared memory.

Every CTA of the cluster has multiplied some of an output tile's k-tiles. Its sums are divided among
*owners*, CTAs that each finish one share of the tile's columns of B: everyone writes each owner its
share, and the owner adds what it was given, always from the first CTA's to the last's. The memory
is the ring's, which nobody needs any more.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from .config_sm90 import WARPGROUP, HopperTile
from .ring import Ring

#: fp32 of one 16-byte access.
_VECTOR = 4


@cute.jit
def meet():
    """A barrier of all threads of all CTAs of the cluster, and of what they wrote."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


#: How often ``exchange`` does: whoever takes no part must as well.
MEETINGS = 2


@cute.jit
def exchange(
    tile: cutlass.Constexpr[HopperTile],
    totals: cute.Tensor,
    ring: Ring,
    thread: Int32,
    rank: Int32,
) -> cute.Tensor:
    """This CTA's share of the whole sums: registers, ``(sums of a share, parts)``.

    Args:
        totals: this thread's sums, ``(sums of a part, parts)``.
        thread: 0 to 128 * warpgroups; every CTA's thread of one number has the same outputs.
        rank: of the CTA in the cluster; past the owners', the result means nothing.
    """
    threads = tile.warpgroups * WARPGROUP
    vectors = tile.share_sums // _VECTOR
    # (vector of 4, sums of a share, parts, rank, thread)
    ring_start = ring.a.iterator.toint()
    words = cute.make_ptr(Float32, ring_start, cute.AddressSpace.smem, assumed_align=16)
    # Every CTA's MMAs have read their last stage.
    meet()
    for owner in cutlass.range_constexpr(tile.owners):
        to = cute.arch.map_dsmem_ptr(words, owner).toint()
        for part in cutlass.range_constexpr(tile.parts):
            for i in cutlass.range_constexpr(vectors):
                first = owner * tile.share_sums + i * _VECTOR
                place = ((rank * tile.parts + part) * vectors + i) * threads + thread
                _store_remote(Int32(to) + 4 * _VECTOR * place, totals, first, part)
    meet()
    share = cute.make_rmem_tensor((tile.share_sums, tile.parts), Float32)
    share.fill(0.0)
    if rank < tile.owners:
        for giver in cutlass.range_constexpr(tile.splits):
            for part in cutlass.range_constexpr(tile.parts):
                for i in cutlass.range_constexpr(vectors):
                    place = ((giver * tile.parts + part) * vectors + i) * threads + thread
                    given = cute.make_tensor(
                        words + _VECTOR * place, cute.make_layout(_VECTOR)
                    ).load()
                    for e in cutlass.range_constexpr(_VECTOR):
                        at = i * _VECTOR + e
                        share[at, part] = share[at, part] + given[e]
    return share


@dsl_user_op
def _store_remote(
    address: Int32,
    values: cute.Tensor,
    first: int,
    part: int,
    *,
    loc: object = None,
    ip: object = None,
) -> None:
    """Four values to the shared memory of a CTA of the cluster."""
    operands = [address.ir_value(loc=loc, ip=ip)]
    operands += [values[first + i, part].ir_value(loc=loc, ip=ip) for i in range(_VECTOR)]
    llvm.inline_asm(
        None,
        operands,
        "st.shared::cluster.v4.f32 [$0], {$1, $2, $3, $4};",
        "r,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
