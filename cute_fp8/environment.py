"""Versions and GPUs: what a result or a report has to carry to mean anything later."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from cute_fp8.targets import capability_of_device, target_of

PACKAGES = ("cute-fp8", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "numpy")


def environment() -> dict[str, str]:
    """Name to value, for people and for JSON."""
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        facts[package] = _version(package)
    facts["gpus"] = ", ".join(gpus()) or "none"
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


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
