"""A progress bar where someone is looking and there is one."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def watched(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """``items``, under a progress bar if stderr is a terminal and rich is installed."""
    if not sys.stderr.isatty():
        return items
    try:
        from cute_fp8.tables import track
    except ModuleNotFoundError:
        return items
    return track(items, what, total)
