r"""A small workload for compute-sanitizer: every tile, tails in M, N and K, a second tile per CTA.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tests/sanitize.py

and the same with ``--tool racecheck`` and ``--tool synccheck``.

Prints one line per call and exits 0 if all results are right; the sanitizer adds its findings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import cute_fp8
from cute_fp8 import cute_backend
from cute_fp8.gemm_case import GemmCase, exact_case, mxfp8_case
from cute_fp8.kernels.config import TileConfig
from cute_fp8.kernels.tiles import TILES


def cases(variant: str, tile: TileConfig) -> Iterator[GemmCase]:
    """Tails everywhere, several output tiles per CTA, every stage used again."""
    make = exact_case if variant == "per_token" else mxfp8_case
    m, n, k = 2 * tile.m + 1, 2 * tile.n + 8, (tile.stages + 1) * tile.k + 32
    yield make(m, n, k, bias=torch.float32, residual=torch.float32)
    if variant == "mxfp8":
        yield mxfp8_case(tile.m + 1, tile.n + 8, 160, blocked=False)


def main() -> int:
    """Run all of them; 1 if a result is wrong."""
    backend = "cute" if torch.cuda.get_device_capability()[0] == 12 else "stand-in"
    # So few CTAs that each has several tiles: a sanitizer multiplies the time of every one.
    cute_backend._sm_count = lambda device: 2
    wrong = 0
    for variant, tiles in TILES.items():
        for tile in tiles:
            for case in cases(variant, tile):
                with cute_fp8.use(backend=backend, config=tile):
                    y = case.run()
                differ = int((y.double() != case.exact()[0]).sum())
                shape = f"{case.m}x{case.n}x{case.k}"
                print(f"{backend} {variant} {tile.name} {shape}: {differ} differ", flush=True)
                wrong += differ
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
