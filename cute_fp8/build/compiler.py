"""Compiled kernels: built by the CuTe DSL on first use, kept in memory, one per (configuration,
target).

Compiling needs no GPU. ``get`` is the only way to a kernel; between its look-up in memory and
``build`` is the cache on disk (``cache.py``).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from typing import Any

import torch

from cute_fp8.build import cache, workers
from cute_fp8.build.cache_key import Key, key_of
from cute_fp8.build.first_launch import launch_once
from cute_fp8.build.shipped import Shape, configs_of, matching, shipped_configs
from cute_fp8.capture import is_capturing
from cute_fp8.kernels.configs import Config
from cute_fp8.progress import watched
from cute_fp8.settings import current
from cute_fp8.targets import (
    capability_of_device,
    check_target,
    target_of,
)

#: A compiled kernel's host function, as ``kernels.gemm_sm120.fake_arguments`` types it.
Kernel = Callable[..., None]

_kernels: dict[tuple[Config, str], Kernel] = {}
#: What the DSL returned: it owns the loaded code.
_owners: list[object] = []
#: What has been handed out for a launch, which loads its code: (configuration, target, device).
_loaded: set[tuple[Config, str, int]] = set()
#: One per kernel: of several threads that want the same, one makes it.
_locks: dict[tuple[Config, str], threading.Lock] = {}
_lock = threading.Lock()


def get(config: Config, target: str, device: torch.device | None = None) -> Kernel:
    """The compiled kernel, loaded from disk or built now if it is not there yet.

    Args:
        device: where it is about to be launched, if anywhere.

    Raises:
        RuntimeError: first use inside a CUDA graph capture, a missing DSL, or a target that it
            refuses.
    """
    if device is not None and (config, target, device.index) not in _loaded:
        # The driver loads code at its first launch on a device, which a capture forbids.
        _refuse_capture(config)
    kernel = _kernels.get((config, target))
    if kernel is None:
        with _lock:
            one_at_a_time = _locks.setdefault((config, target), threading.Lock())
        with one_at_a_time:
            kernel = _kernels.get((config, target))
            if kernel is None:
                made = cache.fetch(_key(config, target), lambda: build(config, target))
                _owners.append(made)
                kernel = _kernels[config, target] = _bare_function(made)
    if device is not None:
        _loaded.add((config, target, device.index))
    return kernel


def _key(config: Config, target: str) -> Key:
    _import_dsl()
    return key_of(config, target, _flags(target))


def _bare_function(made: Any) -> Kernel:
    """What is under the DSL's wrappers, which cost more than the call itself."""
    unwrap = getattr(made, "__tvm_ffi_object__", None)  # what was on disk has none
    function = None if unwrap is None else unwrap()  # and without a GPU there is no function
    return made if function is None else function


def _refuse_capture(config: Config) -> None:
    if is_capturing():
        raise RuntimeError(
            f"gemm: got a first use of {config.name} inside a CUDA graph capture, "
            "must be compiled before: call it once, or cute_fp8.compile(device) if it is among "
            "what that makes ready, outside"
        )


def build(config: Config, target: str, options: str = "") -> Any:
    """Compile one kernel for ``target`` with the CuTe DSL; seconds of work.

    Args:
        options: further compile options of the DSL, e.g. to keep the cubin.

    Raises:
        RuntimeError: the DSL is missing or fails.
    """
    check_target(target)
    cute = _import_dsl()
    kernels = import_module(f"cute_fp8.kernels.{config.module}")
    try:
        with cache.dsl_lock:
            kernel, arguments = kernels.make(config, target)
            return cute.compile(kernel, *arguments, options=f"{_flags(target)} {options}".strip())
    except Exception as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # the DSL writes in colours
        reason = (text.splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f"compile: got {config.name} for {target}, must be a kernel and a target that the "
            f"CuTe DSL compiles ({reason})"
        ) from error


def _flags(target: str) -> str:
    return f"--enable-tvm-ffi --gpu-arch {target}"


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


def compile(
    arch: str | torch.device, ops: str | None = None, *, shapes: Iterable[Shape] | None = None
) -> CompileReport:
    """Make the usual kernels ready: before serving, before a graph capture.

    By default every tile with the epilogues of ``shipped.EPILOGUES``, split-K without one, and row
    kernels for 1024, 4096, 8192 and 14336 columns; with ``shapes`` those that these sizes take.
    Another combination (a tile pinned, other dtypes) compiles at its first call, so call it once.
    Under ``use(backend="stand-in")`` those that it launches.

    What is not on disk is compiled in several processes, which see no GPU, and put there. With a
    terminal and ``rich`` there is a progress bar.

    Args:
        arch: a CUDA device, whose kernels are then also loaded on it, or a target such as
            ``sm_120a``.
        ops: a glob over kernel names; by default everything.
        shapes: ``(M, N, K)`` of the GEMMs to come, in both variants: the configurations that
            selection picks for them now, and row kernels for K columns, strided attention's too.

    Returns:
        What was made ready, with the seconds that each took.

    Raises:
        ValueError: an unknown target, a device without kernels, ops that match nothing, or a
            shape that no GEMM has.
        RuntimeError: called inside a capture, or the DSL is missing.
    """
    device = _as_device(arch)
    target = check_target(str(arch)) if device is None else _target_of_device(device)
    if shapes is None:
        configs = shipped_configs(ops, target, stand_in=current().backend == "stand-in")
    else:
        configs = matching(configs_of(shapes, target, device), ops)
    _refuse_capture(configs[0])
    return CompileReport(watched(_make_ready(configs, target, device), "compiling", len(configs)))


def _make_ready(
    configs: Sequence[Config], target: str, device: torch.device | None
) -> Iterator[tuple[str, str, float]]:
    """Yield a line of the report for each kernel, as soon as it is ready."""
    for config, seconds in zip(configs, fill_disk(configs, target), strict=True):
        start = time.perf_counter()
        kernel = get(config, target, device)
        if device is not None:
            launch_once(kernel, config, device)
        yield config.name, target, seconds + time.perf_counter() - start


def fill_disk(configs: Sequence[Config], target: str) -> Iterator[float]:
    """Compile in parallel what is neither in memory nor on disk; yield each kernel's seconds.

    Where the disk takes no kernels, or for a single one, nothing is done: ``get`` compiles.
    """
    with cache.filling(f"fill-{target}") as can_write:
        missing: list[tuple[Config, str]] = []
        if can_write:  # by now another process may have filled it
            wanted = [config for config in configs if (config, target) not in _kernels]
            missing = [(c, target) for c in wanted if not cache.has(_key(c, target))]
        if len(missing) < 2:
            missing = []
        with closing(workers.run(_put_on_disk, missing)) as seconds:
            for config in configs:
                yield next(seconds) if (config, target) in missing else 0.0


def _put_on_disk(kernel: tuple[Config, str]) -> float:
    start = time.perf_counter()
    get(*kernel)
    return time.perf_counter() - start


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
    if device.type == "cuda" and capability is None:
        raise ValueError(f"arch: got {device}, must be a target such as sm_120a: there is no GPU")
    target = None if capability is None else target_of(capability)
    if target is None:
        raise ValueError(
            f"arch: got {device}, must be a GPU of compute capability 12.x, 10.0, 9.0 or 8.9"
        )
    return target


def forget() -> None:
    """Drop the compiled kernels of this process (for tests)."""
    _kernels.clear()
    _loaded.clear()
