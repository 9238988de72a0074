"""What every call asks of a tensor it is given: an address it can use, no gradient, no tracer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

#: Bytes that an address must be a multiple of: a vector load's, and TMA's.
ALIGNMENT = 16

PLAIN = frozenset({Tensor, Parameter})
PLAIN_OR_NONE = PLAIN | {type(None)}
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_function_mode = torch._C._get_function_stack_at
_transforms = torch._C._are_functorch_transforms_active


def watched() -> bool:
    """Whether a tracer, a mode or a transform wants to see the operators of a call."""
    return bool(
        _is_compiling()
        or _dispatch_modes()
        or (_function_modes() and foreign_modes())
        or _transforms()
    )


def foreign_modes() -> bool:
    """Whether a function mode is on that is none of torch's own for a default device.

    ``torch.set_default_device`` leaves one on for good. It directs allocations that name no device;
    ours do.
    """
    stack = range(_function_modes())
    return any(type(_function_mode(i)) is not DeviceContext for i in stack)


def is_plain(operands: Iterable[Tensor | None]) -> bool:
    """Whether nothing but the call itself would come of it: no subclass, no tracing, no mode."""
    return all(type(t) in PLAIN_OR_NONE for t in operands) and not watched()


def has_storage(tensor: Tensor) -> bool:
    """Whether addresses mean anything: not on the meta device, under tracing or a transform."""
    if _is_compiling() or _transforms():
        return False
    return type(tensor) in PLAIN and tensor.device.type != "meta"


def misaligned_by(tensor: Tensor) -> int:
    """Bytes that its address is past a multiple of :data:`ALIGNMENT`; 0 if it has no address."""
    return tensor.data_ptr() % ALIGNMENT if has_storage(tensor) else 0


def check_aligned(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` if its address is none that a kernel can read or write in vectors."""
    if past := misaligned_by(tensor):
        raise ValueError(
            f"{name}: got an address {past} bytes past a multiple of {ALIGNMENT}, "
            f"must be {ALIGNMENT}-byte aligned"
        )


def check_tensor(name: str, value: object) -> Tensor:
    """Return it, or raise ``TypeError`` if it is no tensor."""
    if isinstance(value, Tensor):
        return value
    raise TypeError(f"{name}: got {type(value).__name__}, must be a torch.Tensor")


def refuse_grad(name: str, tensor: Tensor) -> None:
    """Raise ``RuntimeError`` if a derivative is wanted, backwards or forwards: inference only."""
    if not torch.is_grad_enabled():
        return
    if tensor.requires_grad:
        raise RuntimeError(
            f"{name}: got a tensor that requires grad, must be called under torch.no_grad() "
            "(inference only)"
        )
    # Not while tracing: what is traced has no tangents, and the level would become a guard.
    dual = not _is_compiling() and forward_ad._current_level >= 0
    unpack: Any = forward_ad.unpack_dual  # untyped in torch
    if dual and unpack(tensor).tangent is not None:
        raise RuntimeError(f"{name}: got a tensor with a tangent, must have none (inference only)")
