"""Row-major e8m0 scales to 128x4 blocks, in one launch: what a GEMM with row-major scales needs.

One thread writes one 32-bit word of the blocked form: four neighbouring scales of a row. Padding
rows and columns become 0x00, as in ``to_blocked``. See ``cute_fp8/scales.py`` for the order.
"""

from __future__ import annotations

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float8E8M0FNU, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .arguments import blocked_scales
from .block_scales import BLOCK_WORDS, GROUP_ROWS
from .config import SCALE_BLOCK_BYTES, SCALE_BLOCK_ROWS, RelayoutConfig

_THREADS = 128
_COLUMNS = SCALE_BLOCK_BYTES // SCALE_BLOCK_ROWS


class RelayoutScales:
    """``blocked[...] = scales[rows, columns]``."""

    @cute.jit
    def __call__(self, scales: cute.Tensor, blocked: cute.Tensor, stream: CUstream):
        """Launch on ``stream``; tensors as in ``fake_arguments``."""
        rows, columns = scales.shape
        block_columns = cute.ceil_div(columns, _COLUMNS)
        blocks = cute.ceil_div(rows, SCALE_BLOCK_ROWS) * block_columns
        source = cute.make_tensor(cute.recast_ptr(scales.iterator, dtype=Uint8), scales.layout)
        words = cute.make_tensor(
            cute.recast_ptr(blocked.iterator, dtype=Int32), cute.make_layout(blocks * BLOCK_WORDS)
        )
        self.kernel(source, words, block_columns).launch(
            grid=(blocks * BLOCK_WORDS // _THREADS, 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, source: cute.Tensor, words: cute.Tensor, block_columns: Int32):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        index = cta * _THREADS + thread
        block, within = index // BLOCK_WORDS, index % BLOCK_WORDS
        row = block // block_columns * SCALE_BLOCK_ROWS + within % 4 * GROUP_ROWS + within // 4
        column = block % block_columns * _COLUMNS
        word = Int32(0)
        for i in cutlass.range_constexpr(_COLUMNS):
            if row < source.shape[0] and column + i < source.shape[1]:
                # Masked: the conversion from a byte extends its sign.
                word = word | ((source[row, column + i].to(Int32) & 0xFF) << (8 * i))
        words[index] = word


def fake_arguments() -> list[object]:
    """Row-major contiguous scales ``[rows, columns]``, the blocked form, the current stream."""
    rows, columns = cute.sym_int(), cute.sym_int()
    return [
        make_fake_tensor(Float8E8M0FNU, (rows, columns), (cute.sym_int64(), 1), assumed_align=1),
        blocked_scales(),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def make(config: RelayoutConfig, target: str) -> tuple[RelayoutScales, list[object]]:
    """The kernel, the same for every target, and what to compile it with."""
    return RelayoutScales(), fake_arguments()
