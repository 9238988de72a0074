"""Proving kernels free of races and deadlocks: their PTX, in every schedule of one launch.

The proof is `sentryward`'s (a development extra): it follows warps, mbarriers with their byte
counts, TMA copies with their swizzles, ``ldmatrix`` and named barriers through all interleavings.
It does not model fences. Shapes are small but not trivial: more k-tiles than stages, so that every
stage is reused; two output tiles on one CTA, so that the persistent loop and the epilogue under the
next tile's loads take part; a tail in M and in K.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cute_fp8.build import compiler, shipped
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig
from cute_fp8.kernels.configs import Config
from cute_fp8.kernels.launch import (
    Descriptor,
    Float,
    Launch,
    Pointer,
    describe,
    describe_projection,
)
from cute_fp8.kernels.mlp_config import BLOCK
from cute_fp8.kernels.projection_config import ProjectionConfig
from cute_fp8.targets import check_target

SCHEMA = "spverify.kernel-input/v1"
PASS, UNSUPPORTED = "race_free", "unsupported"
#: Of one check; memory in MiB.
TIMEOUT_SECONDS, MEMORY_LIMIT_MIB = 300, 8_000
#: Rows of a projection that is checked, at most.
MOST_ROWS = 2


@dataclass(frozen=True)
class Proof:
    """The verdict on one kernel.

    Attributes:
        result: the verifier's word; only ``race_free`` is a pass. ``unsupported`` is no proof.
        details: its diagnostics, in short.
        ptx: the head of the digest of what was checked; empty if nothing was.
    """

    kernel: str
    target: str
    result: str
    seconds: float
    details: str = ""
    ptx: str = ""

    @property
    def proved(self) -> bool:
        """Whether the kernel is proved free of races and deadlocks."""
        return self.result == PASS


def problem_of(config: GemmConfig) -> tuple[int, int, int]:
    """M, N, K of the check: two output tiles (ping-pong: two for one group, one for the other), the
    last with a tail in M; every stage used again; a tail in K.
    """
    tile = config.tile
    return tile.groups * tile.m + 2, tile.n, (tile.stages + 1) * tile.k - 32


def launch_of(config: GemmConfig | ProjectionConfig) -> Launch:
    """The launch of the check, on one CTA: split-K with two parts of each tile; a projection with
    so many passes over K that a stage is used again.
    """
    if isinstance(config, ProjectionConfig):
        passes = config.stages // config.slabs + 1
        return describe_projection(config, BLOCK * config.blocks * passes, max_ctas=1)
    return describe(config, *problem_of(config), max_ctas=1, splits=2 if config.split_k else 1)


def build_ptx(config: Config, target: str) -> str:
    """Compile one kernel and return its PTX."""
    with tempfile.TemporaryDirectory(prefix="cute_fp8_") as folder:
        compiler.build(config, target, options=f"--keep-ptx --dump-dir {folder}")
        files = list(Path(folder).rglob("*.ptx"))
        if len(files) != 1:
            raise RuntimeError(f"verify: got {len(files)} PTX files of {config.name}, must be 1")
        return files[0].read_text()


def digest_of(ptx: str) -> str:
    """What tells a kernel's PTX from another's."""
    return hashlib.sha256(ptx.encode()).hexdigest()[:12]


def verifier_input(ptx: str, launch: Launch) -> dict[str, Any]:
    """The verifier's configuration of a launch.

    Raises:
        RuntimeError: the PTX's parameters are not those of the launch description.
    """
    entry, sizes = _entry(ptx)
    described = [parameter.size for parameter in launch.parameters]
    if sizes != described:
        raise RuntimeError(f"verify: got parameters of {sizes} bytes, must be {described}")
    arguments, descriptors, declarations = [], [], []
    for index, parameter in enumerate(launch.parameters):
        name = f"{entry}_param_{index}"
        if isinstance(parameter, Descriptor):
            descriptors.append(_descriptor(name, parameter))
        elif isinstance(parameter, Pointer):
            where = {"parameter": name, "offset": 0}
            kind = {"type": "pointer", "space": "global", "object": parameter.operand}
            declarations.append({**where, **kind})
            arguments += [
                {"type": kind_, "parameter": name, "offset": offset, "value": value}
                for offset, kind_, value in parameter.fields
            ]
        elif isinstance(parameter, Float):
            value = {"type": "f32", "value": parameter.value}
            arguments.append({"parameter": name, "offset": 0, **value})
        else:
            arguments += [
                {"type": "u32", "parameter": name, "offset": 4 * i, "value": value}
                for i, value in enumerate(parameter.values)
            ]
    return {
        "schema": SCHEMA,
        "entry": entry,
        "launch": {
            "grid_dim": [launch.ctas, 1, 1],
            "block_dim": [launch.threads, 1, 1],
            "cluster_dim": [1, 1, 1],
            "dynamic_shared_bytes": launch.smem_bytes,
        },
        "arguments": arguments,
        "tma_descriptors": descriptors,
        "declarations": declarations,
    }


def check_ptx(ptx: str, launch: Launch) -> tuple[str, str]:
    """Run the verifier: its verdict and, if that is no pass, why.

    Raises:
        RuntimeError: it is not installed, or gives no verdict.
    """
    tool = _tool()
    with tempfile.TemporaryDirectory(prefix="cute_fp8_") as name:
        folder = Path(name)
        (folder / "kernel.ptx").write_text(ptx)
        (folder / "input.json").write_text(json.dumps(verifier_input(ptx, launch)))
        command = [tool, "--input", str(folder / "input.json")]
        command += ["--timeout", str(TIMEOUT_SECONDS)]
        command += ["--memory-limit-mib", str(MEMORY_LIMIT_MIB), str(folder / "kernel.ptx")]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS + 60
        )
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        reason = (done.stderr or done.stdout).strip()[:200]
        raise RuntimeError(f"sentryward: got no report ({reason}), must be JSON") from error
    found = [str(d.get("message", d)) for d in report.get("diagnostics", [])]
    if report.get("race_count"):
        found.append(f"{report['race_count']} races")
    return str(report["result"]), "; ".join(dict.fromkeys(found))


def verify_kernel(config: Config, target: str) -> Proof:
    """Compile one kernel for ``target`` and check it.

    Raises:
        ValueError: an unknown target.
        RuntimeError: the DSL or the verifier is missing or fails.
    """
    check_target(target)
    start, digest = time.perf_counter(), ""
    if not isinstance(config, GemmConfig | ProjectionConfig):
        result = UNSUPPORTED
        details = "its launch is not described" if config.smem_bytes else "no shared memory"
    else:
        if isinstance(config, GemmConfig):
            # Atomics, by which parts of split-K are added up, are not modelled.
            config = replace(config, fix_up=False)
        ptx = build_ptx(config, target)
        digest = digest_of(ptx)
        result, details = check_ptx(ptx, launch_of(config))
    return Proof(config.name, target, result, time.perf_counter() - start, details, digest)


def _entry(ptx: str) -> tuple[str, list[int]]:
    """Name of the kernel, and the bytes of each of its parameters."""
    found = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", ptx, re.DOTALL)
    if found is None:
        raise RuntimeError("verify: got PTX without a kernel, must have one")
    sizes = []
    for line in found.group(2).split(","):
        array = re.search(r"\[(\d+)\]\s*$", line.strip())
        scalar = re.search(r"\.[ufsb](\d+)\s", line)
        assert array or scalar, line
        sizes.append(int(array.group(1)) if array else int(scalar.group(1)) // 8)  # type: ignore[union-attr]
    return found.group(1), sizes


def _descriptor(name: str, descriptor: Descriptor) -> dict[str, Any]:
    return {
        "parameter": name,
        "element_type": descriptor.element,
        "rank": 2,
        "global_shape": list(descriptor.shape),
        "global_strides_bytes": [descriptor.stride_bytes],
        "box_shape": list(descriptor.box),
        "element_strides": [1, 1],
        "interleave": "none",
        "swizzle": descriptor.swizzle,
        "oob_fill": "zero",
        "object": descriptor.operand,
    }


def _tool() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "sentryward"
    found = str(beside) if beside.exists() else shutil.which("sentryward")
    if found is None:
        raise RuntimeError(
            "sentryward: got nothing on PATH, must be installed: pip install sentryward"
        )
    return found


def verified_configs(ops: str | None = None) -> list[Config]:
    """Of shipped kernels that differ in their epilogue alone, which has no part in shared memory
    or barriers, one. Of projections, where every row is minutes of work, those with few.
    """
    configs = [config for config in shipped.shipped_configs() if not _left_out(config)]
    return shipped.matching(configs, ops)


def _left_out(config: Config) -> bool:
    if isinstance(config, ProjectionConfig):
        return config.rows > MOST_ROWS
    return isinstance(config, GemmConfig) and config.epilogue != EpilogueConfig()


def verify_kernels(targets: list[str], ops: str | None = None) -> Iterator[Proof]:
    """Check those of ``verified_configs`` for each target, several at a time, in order."""
    for target in targets:
        check_target(target)
    work = [(config, target) for target in targets for config in verified_configs(ops)]
    with ThreadPoolExecutor(workers()) as pool:
        yield from pool.map(lambda pair: verify_kernel(*pair), work)


def workers() -> int:
    """Checks at a time: each keeps a core and up to 2 GB busy."""
    return max(1, min(os.cpu_count() or 1, 8))
