"""Which GPU architectures kernels are compiled for, and which one serves a device."""

from __future__ import annotations

import torch

Capability = tuple[int, int]

#: Targets that ``compile`` accepts. The ``a`` (and ``f``) is what the block-scaled MMA and wgmma
#: need. Row kernels run on all of them, GEMMs need sm_90a or the sm_120 family.
TARGETS = ("sm_90a", "sm_120a", "sm_121a", "sm_120f", "sm_89", "sm_100a")
#: Targets without a GEMM.
ROWS_ONLY = ("sm_89", "sm_100a")


def target_of(capability: Capability) -> str | None:
    """The compile target of a device, by *family*: any 12.x runs the sm_120 kernels.

    None: no kernels.
    """
    major, minor = capability
    if major == 12:
        return {0: "sm_120a", 1: "sm_121a"}.get(minor, "sm_120f")
    return {(9, 0): "sm_90a", (8, 9): "sm_89", (10, 0): "sm_100a"}.get(capability)


def check_capability(capability: object) -> None:
    """Raise ``ValueError`` unless it is a pair of numbers."""
    pair = isinstance(capability, tuple) and len(capability) == 2
    if not pair or not all(type(part) is int for part in capability):  # type: ignore[attr-defined]
        raise ValueError(f"capability: got {capability!r}, must be a pair like (12, 0)")


def capability_of_target(target: str) -> Capability:
    """The compute capability that a target such as ``sm_120a`` is named after."""
    digits = check_target(target)[3:].rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def check_target(target: str) -> str:
    """Return ``target``, or raise.

    Raises:
        ValueError: not one of :data:`TARGETS`. Caught here, before a compiler says it less plainly:
            plain ``sm_120`` has no block-scaled MMA.
    """
    if target not in TARGETS:
        hint = f" (did you mean {target}a?)" if f"{target}a" in TARGETS else ""
        raise ValueError(f"arch: got {target!r}, must be one of {', '.join(TARGETS)}{hint}")
    return target


def capability_of_device(device: torch.device) -> Capability | None:
    """Compute capability of a CUDA device; None for any other device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)
