"""What a caller can pin, for a block of code or the process: the backend and the kernel tile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from cute_fp8.kernels.config import TileConfig
from cute_fp8.kernels.tiles import TILES

BACKENDS = ("auto", "cute", "stand-in", "torch", "reference")


class Settings(NamedTuple):
    """backend: one of :data:`BACKENDS`.

    Tile: a pinned kernel tile, or None for the selection's choice.
    """

    backend: str
    tile: TileConfig | None


def check_backend(backend: str, name: str = "backend") -> str:
    """Return ``backend``, or raise ``ValueError``."""
    if backend not in BACKENDS:
        raise ValueError(f"{name}: got {backend!r}, must be one of {', '.join(BACKENDS)}")
    return backend


def _check_tile(config: TileConfig | str | None) -> TileConfig | None:
    if config is None or isinstance(config, TileConfig):
        return config if config is None else config.check()
    tiles = {tile.name: tile for tiles in TILES.values() for tile in tiles}
    if config in tiles:
        return tiles[config]
    names = ", ".join(tiles)
    raise ValueError(f"config: got {config!r}, must be a TileConfig or one of {names}")


_of_process = Settings(
    check_backend(os.environ.get("CUTE_FP8_BACKEND", "auto"), "CUTE_FP8_BACKEND"), None
)
_current: ContextVar[Settings] = ContextVar("cute_fp8_settings", default=_of_process)
current = _current.get


@contextmanager
def use(backend: str | None = None, config: TileConfig | str | None = None) -> Iterator[None]:
    """Pin the backend and the kernel tile inside a ``with`` block (of this thread or task).

    The variable ``CUTE_FP8_BACKEND``, read at import, sets the backend of the whole process.

    Args:
        backend: ``auto`` (the dispatch table's first match), ``cute`` (only a native CuTe kernel),
            ``stand-in`` (on compute capability 9.0: the sm_120 kernel with a Hopper MMA, for
            testing it there), ``torch`` or ``reference``. None leaves it as it is.
        config: a tile, or its name as ``explain`` prints it; for CuTe kernels only. None leaves it.

    Raises:
        ValueError: an unknown backend, or a tile that breaks a rule.
    """
    before = _current.get()
    token = _current.set(
        Settings(
            before.backend if backend is None else check_backend(backend),
            before.tile if config is None else _check_tile(config),
        )
    )
    try:
        yield
    finally:
        _current.reset(token)
