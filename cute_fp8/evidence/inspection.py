"""Static gates: compile without a GPU, refuse code that cannot run at the chip's full rate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cute_fp8.build import compiler, shipped, workers
from cute_fp8.evidence.sass import Code, read_cubin
from cute_fp8.kernels.config import (
    MAX_WARP_TILE,
    SMEM_LIMIT_SM120,
    EpilogueConfig,
    GemmConfig,
)
from cute_fp8.kernels.config_sm90 import SMEM_LIMIT_SM90
from cute_fp8.kernels.configs import Config
from cute_fp8.kernels.tiles import TILES
from cute_fp8.targets import ROWS_ONLY, check_target

#: Shared memory that one block may have, by the target's family.
SMEM_LIMIT = {
    "sm_12": SMEM_LIMIT_SM120,
    "sm_90": SMEM_LIMIT_SM90,
    "sm_89": 101_376,
    "sm_10": 232_448,
}


@dataclass(frozen=True)
class Inspection:
    """One kernel compiled for one target, and what its code says.

    Attributes:
        kernel, target: names.
        stages, smem_bytes: of the kernel's ring; dynamic shared memory of its launch.
        seconds: to compile.
        code: from the disassembly.
        failures: the gates it does not pass, in words; empty is a pass.
    """

    kernel: str
    target: str
    stages: int
    smem_bytes: int
    seconds: float
    code: Code
    failures: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """As JSON-ready data."""
        data = asdict(self)
        # None where there is no MMA: JSON has no infinity.
        loop = self.code.loop_mma
        data["code"]["others_per_mma"] = round(self.code.others_per_mma, 4) if loop else None
        return data


#: The most other instructions for each MMA that a main loop of 64x64 warp tiles may have, by
#: K-tile; MXFP8 has scales to read beside.
MOST_OTHERS, MOST_OTHERS_FOR_SCALES = {128: 0.50, 64: 0.62}, 0.10


def loop_failures(code: Code, config: Config) -> tuple[str, ...]:
    """What a GEMM's main loop does beside MMAs, if that is more than it may be."""
    if not isinstance(config, GemmConfig) or not code.loop_mma:
        return ()
    tile = config.tile
    most = MOST_OTHERS[tile.k] + (MOST_OTHERS_FOR_SCALES if config.block_scaled else 0)
    if tile.warp_m * tile.warp_n < MAX_WARP_TILE or code.others_per_mma <= most:
        return ()
    return (f"{code.others_per_mma:.2f} other instructions per MMA, at most {most:.2f}",)


def gate_failures(
    code: Code, smem_bytes: int, target: str, multiplies: bool = True
) -> tuple[str, ...]:
    """The gates that a kernel's code does not pass.

    ``multiplies``: whether it is a GEMM, which must have MMAs and TMA loads. On the sm_120 family
    the only MMA allowed is the block-scaled one: the plain one runs at half rate on GeForce.
    Everywhere: no local memory, no stack, no spills, the shared-memory limit.
    """
    limit = SMEM_LIMIT[target[:5]]
    failures = []
    if multiplies and not code.mma:
        failures.append("no tensor-core instruction")
    if target.startswith("sm_12"):
        failures += [
            f"uses {name}, not the block-scaled MMA"
            for name in code.mma
            if not name.startswith("QMMA.SF")
        ]
    if multiplies and not code.tma_loads:
        failures.append("no TMA load")
    if code.local or code.stack or code.spills:
        failures.append(f"{code.local} B local, {code.stack} B stack, {code.spills} spills")
    if smem_bytes > limit:
        failures.append(f"{smem_bytes} B shared memory, limit {limit}")
    return tuple(failures)


def inspect_kernel(config: Config, target: str) -> Inspection:
    """Compile one kernel for ``target`` and read its machine code.

    Raises:
        ValueError: an unknown target.
        RuntimeError: the DSL or the disassembler is missing or fails.
    """
    check_target(target)
    with tempfile.TemporaryDirectory(prefix="cute_fp8_") as folder:
        start = time.perf_counter()
        compiler.build(config, target, options=f"--keep-cubin --dump-dir {folder}")
        seconds = time.perf_counter() - start
        cubins = list(Path(folder).rglob("*.cubin"))
        if len(cubins) != 1:
            raise RuntimeError(f"inspect: got {len(cubins)} cubins of {config.name}, must be 1")
        code = read_cubin(cubins[0])
    smem = config.smem_bytes
    loops = loop_failures(code, config) if target.startswith("sm_12") else ()
    return Inspection(
        config.name,
        target,
        config.stages,
        smem,
        seconds,
        code,
        gate_failures(code, smem, target, config.multiplies) + loops,
    )


def inspect_kernels(targets: list[str], ops: str | None = None) -> Iterator[Inspection]:
    """Inspect the shipped kernels that match ``ops``, in several processes; results in order."""
    for target in targets:
        check_target(target)
    wanted = ((config, target) for target in targets for config in inspected_configs(ops, target))
    return workers.run(_inspect, list(wanted))


def inspected_configs(ops: str | None = None, target: str | None = None) -> list[Config]:
    """What is shipped, and what is built on request only: a dynamic schedule, dependent launch.

    Raises:
        ValueError: nothing matches ``ops``.
    """
    if target in ROWS_ONLY:
        return shipped.shipped_configs(ops, target)
    if target == "sm_90a":
        return shipped.shipped_configs(ops, target)
    plain = EpilogueConfig()
    options = ({"dynamic": True}, {"pdl": True})
    on_request = [GemmConfig(TILES[v][0], plain, v, **how) for v in TILES for how in options]
    return shipped.matching([*shipped.shipped_configs(target=target), *on_request], ops)


def _inspect(kernel: tuple[Config, str]) -> Inspection:
    return inspect_kernel(*kernel)
