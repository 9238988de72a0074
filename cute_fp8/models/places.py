"""The places of linear layers in a model, and those where no other kind of layer may be put."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from cute_fp8.gemms.problem import OUT_DTYPES
from cute_fp8.models.fusing import Part, is_whole
from cute_fp8.models.linear import Linear

#: How words begin in names of methods that make, tie or join weights, past any run of the model.
_APART = ("init", "reset", "resize", "tie", "set", "fuse", "unfuse", "merge", "prune", "load")
#: What FP8 weights have as others do, so that reading it is no reason.
_HARMLESS = r"(?!\.(?:device|shape|size)\b)"


def linear_places(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers and what stands for them, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Part)) and not is_whole(module)
    }


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` in the place called ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def refusal(model: nn.Module, name: str) -> str | None:
    """Why the ``nn.Linear`` in a place cannot become a :class:`Linear`; None if it can.

    What can be said of modules alone, without the values or sizes of their tensors.
    """
    linear = model.get_submodule(name)
    if isinstance(linear, (Linear, Part)):
        return None
    assert isinstance(linear, nn.Linear)
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, only nn.Linear itself is replaced"
    if linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook"):
        return "has forward hooks, which would be lost"
    if (reader := _reader(model, name)) is not None:
        return f"{reader} reads its weight itself"
    if linear.bias is not None and linear.bias.dtype not in OUT_DTYPES:
        return f"its bias is {linear.bias.dtype}"
    return None


def _reader(model: nn.Module, name: str) -> str | None:
    """The class of a module around a layer that reads the layer's weight past its forward."""
    path = name.split(".")
    for depth in reversed(range(len(path))):
        owner = model.get_submodule(".".join(path[:depth]))
        inside = path[depth:]
        if isinstance(owner, nn.MultiheadAttention):
            return type(owner).__name__
        # An index in the code is the layer's own, or a variable.
        steps = (
            rf"\[(?:{s}|[^\d\]][^\]]*)\]" if s.isdigit() else rf"\.{re.escape(s)}" for s in inside
        )
        read = re.compile(rf"\bself{''.join(steps)}\.(?:weight|bias)\b{_HARMLESS}")
        attributes = {s for s in inside if not s.isdigit()}
        kind: Any = type(owner)
        for names, source in _readings(kind):
            if attributes <= names and (source is None or read.search(source)):
                return type(owner).__name__
    return None


@lru_cache(maxsize=1024)
def _readings(kind: type[nn.Module]) -> tuple[tuple[frozenset[str], str | None], ...]:
    """Of each method of a class that reads some weight or bias: the names that it uses, and its
    source if there is one.
    """
    found = []
    for method in _methods(kind):
        names = frozenset(method.__code__.co_names)
        if not names & {"weight", "bias"}:
            continue
        try:
            source = inspect.getsource(method)
        except (OSError, TypeError):
            source = None
        found.append((names, source))
    return tuple(found)


def _methods(kind: type[nn.Module]) -> Iterator[Callable[..., Any]]:
    """Its own and inherited functions, of properties too, that run when a model does."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, value in vars(base).items():
            if name in seen or any(word.startswith(_APART) for word in name.split("_")):
                continue
            seen.add(name)
            method = value.fget if isinstance(value, property) else value
            method = inspect.unwrap(method) if callable(method) else None
            if inspect.isfunction(method):
                yield method
