r"""A small workload for compute-sanitizer: every tile, tails in M, N and K, a second tile per CTA.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tests/sanitize.py

and the same with ``--tool racecheck`` and ``--tool synccheck``.

Prints one line per call and exits 0 if all results are right; the sanitizer adds its findings.
"""

from __future__ import annotations

import sys

import torch

import cute_fp8
from cute_fp8.gemm_case import exact_case
from cute_fp8.kernels.config import TILES


def main() -> int:
    backend = "cute" if torch.cuda.get_device_capability()[0] == 12 else "stand-in"
    wrong = 0
    for tile in TILES:
        for m, n, k in ((tile.m + 1, tile.n + 8, 144), (tile.m * 12 + 5, tile.n * 12 + 8, 400)):
            case = exact_case(m, n, k, bias=torch.float32, residual=torch.float32)
            with cute_fp8.use(backend=backend, config=tile):
                y = case.run()
            differ = int((y.double() != case.exact()[0]).sum())
            print(f"{backend} {tile.name} {m}x{n}x{k}: {differ} elements differ", flush=True)
            wrong += differ
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
