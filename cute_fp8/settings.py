"""What a caller can pin, for a block of code or the process: the backend and the configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from cute_fp8.gemms.choice import Choice, Pick, Tile, choice_of

BACKENDS = ("auto", "cute", "stand-in", "torch", "reference")


class Settings(NamedTuple):
    """What is pinned.

    Attributes:
        backend: one of :data:`BACKENDS`.
        choice: a kernel configuration, or None for the selection's.
        pdl: whether all kernels but GEMMs are launched while the kernel before them ends; GEMMs are
            as their configuration says.
    """

    backend: str
    choice: Choice | None
    pdl: bool = True


def check_backend(backend: str, name: str = "backend") -> str:
    """Return ``backend``, or raise ``ValueError``."""
    if backend not in BACKENDS:
        raise ValueError(f"{name}: got {backend!r}, must be one of {', '.join(BACKENDS)}")
    return backend


_of_process = Settings(
    check_backend(os.environ.get("CUTE_FP8_BACKEND", "auto"), "CUTE_FP8_BACKEND"), None
)
_current: ContextVar[Settings] = ContextVar("cute_fp8_settings", default=_of_process)
current = _current.get


@contextmanager
def use(
    backend: str | None = None,
    config: Choice | Pick | Tile | str | None = None,
    pdl: bool | None = None,
) -> Iterator[None]:
    """Pin the backend and the configuration inside a ``with`` block (of this thread or task).

    Without a pinned ``config`` each problem gets the one that is predicted, or was tuned, to be
    fastest for its very sizes: results are not batch-invariant, a row may come out differently in
    the last bits beside more rows. With one they are, and a call that it cannot serve is refused.

    The variable ``CUTE_FP8_BACKEND``, read at import, sets the backend of the whole process.

    Args:
        backend: ``auto`` (the dispatch table's first match), ``cute`` (only a native CuTe kernel),
            ``stand-in`` (on compute capability 9.0: the sm_120 kernel with a Hopper MMA, for
            testing it there), ``torch`` or ``reference``. None leaves it as it is.
        config: a tile, a choice or its name as ``explain`` prints it, e.g.
            ``64x64x128_s6_w2x2/split4``; for CuTe kernels only. None leaves it.
        pdl: launch the producers' kernels and the decoder's, from compute capability 9.0 on, while
            the kernel before them ends (programmatic dependent launch); they wait for its results.
            On unless it is turned off. None leaves it. GEMMs are launched so on Hopper, and where
            their configuration's name ends in ``/pdl``.

    Raises:
        TypeError: pdl is no bool.
        ValueError: an unknown backend, or a configuration that breaks a rule.
    """
    if pdl is not None and not isinstance(pdl, bool):
        raise TypeError(f"pdl: got {type(pdl).__name__}, must be a bool")
    before = _current.get()
    token = _current.set(
        Settings(
            before.backend if backend is None else check_backend(backend),
            before.choice if config is None else choice_of(config),
            before.pdl if pdl is None else pdl,
        )
    )
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def unpinned() -> Iterator[None]:
    """No pinned configuration inside a ``with`` block; the backend stays."""
    token = _current.set(_current.get()._replace(choice=None))
    try:
        yield
    finally:
        _current.reset(token)
