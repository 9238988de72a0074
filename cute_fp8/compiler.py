"""Compiled kernels: built by the CuTe DSL on first use, kept in memory, one per (configuration,
target).

Compiling needs no GPU. ``get`` is the only way to a kernel; a cache on disk belongs between its
look-up and ``build``.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch

from cute_fp8.capture import is_capturing
from cute_fp8.kernels.config import OUT_DTYPES, TILES, EpilogueConfig, GemmConfig
from cute_fp8.targets import capability_of_device, check_target, target_of

#: A compiled kernel's host function, as ``kernels.gemm_sm120.fake_arguments`` types it.
Kernel = Callable[..., None]

_kernels: dict[tuple[GemmConfig, str], Kernel] = {}
#: What the DSL returned: it owns the loaded code.
_owners: list[object] = []
#: Where a kernel's code has been loaded, or is about to be: (configuration, target, device index).
_loaded: set[tuple[GemmConfig, str, int]] = set()
_lock = threading.Lock()
#: The DSL's tracer keeps global state: one compilation at a time.
_tracer = threading.Lock()

#: The epilogues that ``compile`` builds; any other combination is compiled at its first call.
EPILOGUES = (
    *(EpilogueConfig(out=out) for out in OUT_DTYPES),
    EpilogueConfig(bias="bfloat16"),
    EpilogueConfig(residual="bfloat16"),
    EpilogueConfig(bias="bfloat16", residual="bfloat16"),
    EpilogueConfig(bias="bfloat16", activation="gelu"),
    EpilogueConfig(activation="silu"),
)


def shipped_configs(ops: str | None = None) -> list[GemmConfig]:
    """The configurations that ``compile`` builds: every tile with every epilogue of
    :data:`EPILOGUES`.

    Args:
        ops: a glob over their names, e.g. ``gemm_per_token-128x128*``; None for all.

    Raises:
        ValueError: nothing matches.
    """
    configs = [GemmConfig(tile, epilogue) for tile in TILES for epilogue in EPILOGUES]
    chosen = [config for config in configs if ops is None or fnmatch(config.name, ops)]
    if not chosen:
        raise ValueError(f"ops: got {ops!r}, must match a kernel name such as {configs[0].name}")
    return chosen


def get(config: GemmConfig, target: str, device: torch.device | None = None) -> Kernel:
    """The compiled kernel, built now if it is not there yet.

    Args:
        device: where it is about to be launched, if anywhere.

    Raises:
        RuntimeError: first use inside a CUDA graph capture, a missing DSL, or a target that it
            refuses.
    """
    if device is not None and (config, target, device.index) not in _loaded:
        # The driver loads code at its first launch on a device, which a capture forbids.
        _refuse_capture(config)
        _loaded.add((config, target, device.index))
    kernel = _kernels.get((config, target))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((config, target))
            if kernel is None:
                compiled = build(config, target)
                _owners.append(compiled)
                # The bare function under the DSL's wrappers, which cost more than the call itself.
                # Without a GPU there is none.
                function = compiled.__tvm_ffi_object__()
                kernel = _kernels[config, target] = compiled if function is None else function
    return kernel


def _refuse_capture(config: GemmConfig) -> None:
    if is_capturing():
        raise RuntimeError(
            f"gemm: got a first use of {config.name} inside a CUDA graph capture, "
            "must be compiled before: call it once, or cute_fp8.compile(device), outside"
        )


def build(config: GemmConfig, target: str, options: str = "") -> Any:
    """Compile one kernel for ``target`` with the CuTe DSL; seconds of work.

    Args:
        options: further compile options of the DSL, e.g. to keep the cubin.

    Raises:
        RuntimeError: the DSL is missing or fails.
    """
    check_target(target)
    cute = _import_dsl()
    from cute_fp8.kernels.gemm_sm120 import GemmSm120, fake_arguments
    from cute_fp8.kernels.mma import Instruction

    kernel = GemmSm120(config, Instruction.of(target))
    flags = f"--enable-tvm-ffi --gpu-arch {target} {options}".strip()
    try:
        with _tracer:
            return cute.compile(kernel, *fake_arguments(config), options=flags)
    except Exception as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # the DSL writes in colours
        reason = (text.splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f"compile: got {config.name} for {target}, must be a kernel and a target that the "
            f"CuTe DSL compiles ({reason})"
        ) from error


def _import_dsl() -> Any:
    try:
        from cutlass import cute
    except ImportError as error:
        raise RuntimeError(
            f"nvidia-cutlass-dsl: got an import error ({error}), must be installed: "
            "pip install 'nvidia-cutlass-dsl>=4.8,<4.9'"
        ) from error
    return cute


class CompileReport(list[tuple[str, str, float]]):
    """``(kernel, target, seconds)`` of each kernel that ``compile`` made ready; prints as lines."""

    def __str__(self) -> str:
        return "\n".join(f"{target}  {seconds:6.2f} s  {name}" for name, target, seconds in self)


def compile(arch: str | torch.device, ops: str | None = None) -> CompileReport:
    """Make kernels ready, so that no later call compiles: before serving, before a graph capture.

    Args:
        arch: a CUDA device, whose kernels are then also loaded on it, or a target such as
            ``sm_120a``.
        ops: a glob over kernel names; by default everything that is shipped.

    Returns:
        What was made ready, with the seconds that each took.

    Raises:
        ValueError: an unknown target, a device without kernels, or ops that match nothing.
        RuntimeError: called inside a capture, or the DSL is missing.
    """
    from cute_fp8 import cute_backend

    device = _as_device(arch)
    target = check_target(str(arch)) if device is None else _target_of_device(device)
    report = CompileReport()
    for config in shipped_configs(ops):
        start = time.perf_counter()
        kernel = get(config, target, device)
        if device is not None:
            cute_backend.launch_once(kernel, config, device)
        report.append((config.name, target, time.perf_counter() - start))
    return report


def _as_device(arch: str | torch.device) -> torch.device | None:
    if isinstance(arch, str) and not arch.startswith("cuda"):
        return None
    device = torch.device(arch)
    index: int | None = device.index  # torch's stubs forget that it may be absent
    if device.type == "cuda" and index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _target_of_device(device: torch.device) -> str:
    capability = capability_of_device(device)
    target = None if capability is None else target_of(capability)
    if target is None:
        raise ValueError(f"arch: got {device}, must be a GPU of compute capability 12.x or 9.0")
    return target


def forget() -> None:
    """Drop the compiled kernels of this process (for tests)."""
    _kernels.clear()
    _loaded.clear()
