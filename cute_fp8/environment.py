"""Versions, GPUs, driver, cache: what a result has to carry to mean anything later, and what
``python -m cute_fp8 info`` says about an installation.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cute_fp8.build import cache, kernel_sources, wheels
from cute_fp8.targets import capability_of_device, target_of

#: A source checkout's root; in an installed package a folder without our tests.
ROOT = Path(__file__).resolve().parent.parent
#: Distributions whose version is recorded under their own name.
PACKAGES = ("apache-tvm-ffi", "cuda-python", "numpy")

CudaVersion = tuple[int, int]


def environment() -> dict[str, str]:
    """What a result carries: versions, the kernels' sources, the current GPU and driver.

    Names to values, for people and for JSON; the names are those of the result files' ``meta``.
    """
    import cute_fp8

    facts = {
        "cute_fp8": cute_fp8.__version__,
        "torch": torch.__version__,
        "kernels": kernel_sources.as_line(),
        "dsl": wheels.version(wheels.FAMILY),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        facts[package] = wheels.version(package)
    here = torch.cuda.is_available()
    facts["gpu"] = torch.cuda.get_device_name() if here else "none"
    facts["capability"] = "{}.{}".format(*torch.cuda.get_device_capability()) if here else "none"
    facts["driver"] = driver()
    return facts


def gpus() -> list[str]:
    """Each visible GPU with its compute capability and the target that its kernels are compiled
    for.
    """
    found = []
    for index in range(torch.cuda.device_count()):
        capability = capability_of_device(torch.device("cuda", index))
        if capability is not None:
            target = target_of(capability) or "no kernels"
            found.append(
                f"{torch.cuda.get_device_name(index)} ({capability[0]}.{capability[1]}, {target})"
            )
    return found


def driver() -> str:
    """The NVIDIA driver's version, or ``none``."""
    return nvidia_smi("driver_version").get("driver_version", "none")


def nvidia_smi(*fields: str) -> dict[str, str]:
    """What ``nvidia-smi`` says of the current GPU; what it does not know is left out."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    # By identity, since CUDA_VISIBLE_DEVICES numbers GPUs in its own way; some containers hide it.
    for choice in ([f"--id={_gpu_identity()}"], []):
        done = subprocess.run([*command, *choice], capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
        values = [value.strip() for value in lines[0].split(",")] if lines else []
        if len(values) == len(fields):
            return {f: v for f, v in zip(fields, values, strict=True) if v and v[0] != "["}
    return {}


def _gpu_identity() -> str:
    if not torch.cuda.is_available():
        return "0"
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return "0" if uuid is None else f"GPU-{uuid}"


def commit(root: Path = ROOT) -> str:
    """The commit of the source tree, by the variable ``GIT_COMMIT`` or by git."""
    if named := os.environ.get("GIT_COMMIT"):
        return named
    if shutil.which("git") is not None and (root / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return "unknown"


# --------------------------------------------------------------------------- driver and toolkits


def driver_cuda() -> CudaVersion | None:
    """The newest CUDA that the driver is for, without making a context; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (AttributeError, OSError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def torch_cuda() -> CudaVersion | None:
    """The CUDA that torch is built with, if any."""
    return None if torch.version.cuda is None else _parse(torch.version.cuda)


def dsl_cuda() -> CudaVersion | str:
    """The CUDA of the DSL's compiler; in words why there is none. Imports the DSL (seconds)."""
    try:
        version = importlib.import_module("cutlass").CUDA_VERSION
        return int(version.major), int(version.minor)
    except ImportError as error:
        return f"cannot be imported ({_first_line(error)})"
    except Exception as error:  # a damaged installation raises what it likes
        return f"fails at import ({type(error).__name__}: {_first_line(error)})"


def driver_verdict(
    driver: CudaVersion | None, torch_built: CudaVersion | None, dsl: CudaVersion | str
) -> str:
    """Whether the driver can run what torch and the DSL make, in one line.

    A driver runs every toolkit of its own or an older major version. Of a newer minor version it
    runs machine code, which is what the DSL's kernels are loaded as, but no PTX.
    """
    if driver is None:
        return "no NVIDIA driver here: kernels can be compiled and inspected, not run"
    have = f"the driver is for CUDA {_dotted(driver)}"
    if torch_built is None:
        return f"{have}, but this torch is built without CUDA: install one that has it"
    if torch_built[0] > driver[0]:
        return (
            f"{have}, torch is built with {_dotted(torch_built)}: update the driver, or install a "
            f"torch for CUDA {driver[0]}"
        )
    if isinstance(dsl, str):
        return f"{have}; the DSL {dsl}"
    if dsl[0] > driver[0]:
        return (
            f"{have}, the DSL compiles with {_dotted(dsl)}: update the driver, or "
            f"pip install '{wheels.FAMILY}{wheels.SUPPORTED}', which brings CUDA 12"
        )
    newer = [
        f"{name} {_dotted(version)}"
        for name, version in (("torch's", torch_built), ("the DSL's", dsl))
        if version > driver
    ]
    if newer:
        return f"ok: {have}, older than {' and '.join(newer)}, whose machine code it still runs"
    return f"ok: {have}, torch is built with {_dotted(torch_built)}, the DSL with {_dotted(dsl)}"


def _parse(version: str) -> CudaVersion:
    major, _, rest = version.partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def _dotted(version: CudaVersion) -> str:
    return f"{version[0]}.{version[1]}"


# ------------------------------------------------------------------------------------------ info


def info() -> dict[str, Any]:
    """All that ``info`` prints but the dispatch table, JSON-ready."""
    found = wheels.check()
    dsl = dsl_cuda()
    return {
        "versions": environment(),
        "gpus": gpus(),
        "driver": driver_verdict(driver_cuda(), torch_cuda(), dsl),
        "dsl": {"cuda": dsl if isinstance(dsl, str) else _dotted(dsl), "wheels": asdict(found)},
        "cache": cache_facts(),
    }


def info_text(facts: dict[str, Any]) -> str:
    """:func:`info` for people."""
    lines = [f"{name:16} {value}" for name, value in facts["versions"].items()]
    gpus = facts["gpus"] or ["none"]
    lines += ["", *(f"{'GPUs' if i == 0 else '':16} {gpu}" for i, gpu in enumerate(gpus))]
    lines.append(f"{'driver, toolkits':16} {facts['driver']}")
    lines.append(f"{'DSL wheels':16} {wheels.Wheels(**facts['dsl']['wheels'])}")
    cache = facts["cache"]
    lines.append(f"{'kernel cache':16} {cache['place']}")
    if "files" in cache:
        lines.append(f"{'':16} {cache['files']} kernels, {cache['bytes'] / 1e6:.1f} MB")
        counts = ", ".join(f"{count} {name}" for name, count in cache["stats"].items())
        lines.append(f"{'':16} in this process: {counts}")
    return "\n".join(lines)


def cache_facts() -> dict[str, Any]:
    """Where compiled kernels are kept, how much is there, and how often it helped."""
    place = cache.location()
    if place is None:
        return {"place": f"off ({cache.VARIABLE}): kernels are kept in memory only"}
    files, size = cache.size()
    return {
        "place": str(place),
        "files": files,
        "bytes": size,
        "stats": cache.stats()._asdict(),
    }


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
