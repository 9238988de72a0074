"""A Hopper tile's outputs through shared memory: ``stmatrix`` into boxes, TMA stores of them.

A box is 64 rows, one warpgroup's, of 64 16-bit outputs. From registers a thread would need the
words of other lanes to store 16 bytes, and an address and a bounds check for each; ``stmatrix``
takes them as the MMA leaves them, and TMA finds the place in memory, leaves out what is past the
end, and works while the warpgroup multiplies for its next tile. Rows are 128-byte swizzle rows: the
8 that one matrix is written to lie in 8 different bank groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from .config import PIECE, STAGE_ALIGNMENT
from .config_sm90 import (
    BOX_COLUMNS,
    BOX_ROWS,
    WARP_ROWS,
    WARPGROUP,
    HopperConfig,
    WarpShare,
)
from .epilogue import DTYPES, GROUP, Epilogue, EpilogueOperands
from .pieces import pair_words
from .staging import FIRST_BARRIER

#: Bytes of a box's row; outputs that one ``stmatrix`` writes of each of a warp's rows.
_ROW_BYTES, _COLUMNS = 128, 16


class Boxes(NamedTuple):
    """The boxes of all warpgroups, and where they go."""

    memory: cute.Tensor  # (rows, columns, boxes of a warpgroup, warpgroups)
    tma: Any  # cpasync.TmaInfo


class BoxEpilogue(Epilogue):
    """The epilogue of one warp's 16 rows of a box, whose outputs stay where the MMA left them."""

    @cute.jit
    def packed(
        self,
        acc: cute.Tensor,
        operands: EpilogueOperands,
        m: Int32,
        n: Int32,
        first_row: Int32,
        first_column: Int32,
        lane: Int32,
    ):
        """Words of two outputs, ``(4, output columns / 16)``: the upper and the lower piece of 8
        columns, then those of the next 8. Arguments as of ``__call__``.
        """
        quad, lane_in_quad = lane // 4, lane % 4
        channels = self._channel_values(operands, n, first_column + 2 * lane_in_quad)
        scales = [
            self._row_scales(operands, m, first_row + i * PIECE + quad)[0] for i in range(self.rows)
        ]
        words = cute.make_rmem_tensor((GROUP, self.out_columns // 2), Int32)
        for j in cutlass.range_constexpr(0, self.out_columns, 2):
            values = cute.make_rmem_tensor((2, GROUP), Float32)
            for piece in cutlass.range_constexpr(GROUP):
                below, beside = piece % 2, j + piece // 2
                for e in cutlass.range_constexpr(2):
                    values[e, piece] = self._value(acc, scales[below], channels, e, below, beside)
            pairs = pair_words(values, DTYPES[self.config.out])
            for piece in cutlass.range_constexpr(GROUP):
                words[piece, j // 2] = pairs[piece]
        return words


class BoxStore:
    """Specialised by a :class:`HopperConfig` that has boxes."""

    def __init__(self, config: HopperConfig):
        self.config = config
        self.ratio = 2 if config.epilogue.gated else 1
        share = WarpShare(WARP_ROWS, BOX_COLUMNS * self.ratio, False)
        self.epilogue = BoxEpilogue(share, config.epilogue, scaled=True, staged=True)

    @cute.jit
    def atom(self, out: cute.Tensor):
        """The TMA store of a box."""
        plain = cute.make_layout((BOX_ROWS, BOX_COLUMNS), stride=(BOX_COLUMNS, 1))
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), out, layout, (BOX_ROWS, BOX_COLUMNS)
        )

    @cute.jit
    def allocate(self, tma: Any) -> Boxes:
        """Shared memory for the boxes."""
        box = BOX_ROWS * BOX_COLUMNS
        boxes, groups = self.config.boxes, self.config.tile.warpgroups
        layout = cute.make_layout(
            (BOX_ROWS, BOX_COLUMNS, boxes, groups), stride=(BOX_COLUMNS, 1, box, boxes * box)
        )
        memory = SmemAllocator().allocate_tensor(
            DTYPES[self.config.epilogue.out],
            layout,
            byte_alignment=STAGE_ALIGNMENT,
            swizzle=cute.make_swizzle(3, 4, 3),
        )
        return Boxes(memory, tma)

    @cute.jit
    def __call__(
        self,
        acc: cute.Tensor,
        boxes: Boxes,
        operands: EpilogueOperands,
        m: Int32,
        n: Int32,
        place: tuple[Int32, Int32],
        part: cutlass.Constexpr,
        group: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """Store one part of a warpgroup's tile.

        Args:
            acc: this warp's sums, as of the epilogue.
            place: the part's first token and channel.
            part: its number in the tile; group, warp: which warpgroup this is, and of its warps.
        """
        row, channel = place
        each, barrier = self.config.part_boxes, FIRST_BARRIER + group
        width = BOX_COLUMNS * self.ratio
        for i in cutlass.range_constexpr(each):
            slot = (part * each + i) % self.config.boxes
            first = channel + i * width
            sums = cute.make_tensor(
                acc.iterator + i * width // 2, cute.make_layout((4, width // PIECE, 1))
            )
            words = self.epilogue.packed(sums, operands, m, n, row + warp * WARP_ROWS, first, lane)
            if warp == 0:
                # What it stored from this box has been read.
                cute.arch.cp_async_bulk_wait_group(self.config.boxes - 1, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
            box = boxes.memory[None, None, slot, group]
            self.write(words, box, warp, lane)
            # TMA, another proxy, reads what was written here.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
            if warp == 0:
                self.send(boxes.tma, box, row // BOX_ROWS, first // width)

    @cute.jit
    def write(self, words: cute.Tensor, box: cute.Tensor, warp: Int32, lane: Int32):
        """One warp's rows of a box. Lane l has the address of row l % 8 of matrix l // 8: the
        upper one of 8 columns, the lower one, those of the next 8.
        """
        in_piece, right = lane % PIECE, lane // (2 * PIECE)
        row = warp * WARP_ROWS + lane % WARP_ROWS
        # A row's 16-byte chunks are permuted by its number; two chunks on is an XOR of 32.
        start = box.iterator.toint() + row * _ROW_BYTES
        start += (right ^ in_piece) * 2 * PIECE
        for i in cutlass.range_constexpr(BOX_COLUMNS // _COLUMNS):
            _store_matrices(Int32(start) ^ (i * 2 * _COLUMNS), words, i)

    @cute.jit
    def send(self, tma: Any, box: cute.Tensor, row: Int32, column: Int32):
        """Start the store of a box; by one warp."""
        tiles = cute.local_tile(tma.tma_tensor, (BOX_ROWS, BOX_COLUMNS), (None, None))
        smem_part, gmem_part = cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(box, 0),
            cute.group_modes(tiles[None, None, row, column], 0),
        )
        cute.copy(tma.atom, smem_part, gmem_part)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def drain(self, warp: Int32):
        """Before a warpgroup leaves: its boxes have been read."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dsl_user_op
def _store_matrices(
    address: Int32, words: cute.Tensor, i: int, *, loc: object = None, ip: object = None
) -> None:
    """Four 8x8 matrices of 16-bit values to shared memory, from all lanes of a warp."""
    operands = [address.ir_value(loc=loc, ip=ip)]
    operands += [words[piece, i].ir_value(loc=loc, ip=ip) for piece in range(4)]
    llvm.inline_asm(
        None,
        operands,
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
