"""What autotuning found, kept in one JSON file beside the compiled kernels.

    {"RTX 5090": {"dsl 4.8.1, cute_fp8 0.1.0": {"<problem>": {"config": "<name>", "us": 12.3}}}}

It is read once per process; what another process finds later is seen by the next one. A file that
is no such JSON is ignored, with one warning, and written anew by the next autotuning; entries that
are nothing we know are passed over. Writers hold a lock and rename a complete file into place.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from cute_fp8.build import cache, wheels
from cute_fp8.gemms.choice import Choice, parse

FILE = "tuned.json"

#: Problem names to configuration names, by GPU; filled at first use.
_found: dict[str, dict[str, str]] = {}
_loaded = False
_lock = threading.Lock()


def winner(gpu: str, problem: str) -> Choice | None:
    """What autotuning found fastest for a problem on a GPU of that name, if it was asked."""
    if not _loaded:
        _load()
    name = _found.get(gpu, {}).get(problem)
    if name is None:
        return None
    try:
        return parse(name)
    except ValueError:
        return None  # of a version that knew other tiles


def keep(gpu: str, found: dict[str, tuple[Choice, float]]) -> Path | None:
    """Keep the winners, each with its microseconds, by problem: in this process, and on disk.

    Returns the file, or None where there is no folder to write to, of which one warning is given.
    """
    if not _loaded:
        _load()
    with _lock:
        _found.setdefault(gpu, {}).update({p: choice.name for p, (choice, _) in found.items()})
    folder = cache.usable_folder()
    if folder is None:
        return None
    with cache.locked(folder, FILE) as leave:
        if not leave:
            return None
        path = folder / FILE
        everything = _read(path)  # as others may have left it since
        versions = _mapping(everything, gpu)
        ours = _mapping(versions, _versions())
        for problem, (choice, us) in found.items():
            ours[problem] = {"config": choice.name, "us": round(us, 3)}
        try:
            _write(path, everything)
        except OSError as error:
            cache.warn("tuned", folder, f"gets no tuned configurations: {error}")
            return None
    return path


def forget() -> None:
    """Read the file again when next asked (for tests)."""
    global _loaded
    with _lock:
        _found.clear()
        _loaded = False


def _load() -> None:
    global _loaded
    folder = cache.location()
    everything = {} if folder is None else _read(folder / FILE)
    with _lock:
        if _loaded:
            return
        versions = _versions() if everything else ""
        for gpu, by_version in everything.items():
            ours = by_version.get(versions) if isinstance(by_version, dict) else None
            for problem, entry in ours.items() if isinstance(ours, dict) else ():
                name = entry.get("config") if isinstance(entry, dict) else None
                if isinstance(name, str):
                    _found.setdefault(gpu, {})[problem] = name
        _loaded = True


def _read(path: Path) -> dict[str, Any]:
    """What the file holds; nothing, with one warning, if that is no JSON object."""
    try:
        everything = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(everything, dict):
            return everything
        fault = "holds no object"
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, RecursionError, ValueError) as error:
        fault = (str(error).splitlines() or [type(error).__name__])[0]
    text = f"has a bad file, ignored until the next autotuning rewrites it: {path.name} ({fault})"
    cache.warn("bad tuned", path.parent, text)
    return {}


def _write(path: Path, everything: dict[str, Any]) -> None:
    descriptor, name = tempfile.mkstemp(".tmp", f"{FILE}.", path.parent)  # mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _mapping(parent: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under a key, made if there is none."""
    if not isinstance(parent.get(key), dict):
        parent[key] = {}
    child: dict[str, Any] = parent[key]
    return child


def _versions() -> str:
    """What a configuration's speed depends on besides the GPU."""
    from cute_fp8 import __version__

    return f"dsl {wheels.version(wheels.FAMILY)}, cute_fp8 {__version__}"
