"""Compiled kernels on disk: a process that finds its kernels there compiles nothing.

The folder is ``$CUTE_FP8_CACHE_DIR``, by default ``$XDG_CACHE_HOME/cute_fp8`` or
``~/.cache/cute_fp8``, mode 0700. The variable set to nothing, ``0`` or ``off`` means no disk. A
folder that others can write is not used: what is loaded from it runs in this process.

A kernel is one file, ``<key>.o``: the object that the DSL exports, one line with what the key is a
digest of, and a footer with a digest of it all. Nothing reaches the DSL's loader before that digest
and that line have been checked. Only the holder of the key's lock writes, to a temporary name that
is renamed when it is complete and synced. Files are never changed, so readers need no lock, and a
folder that cannot be written still serves.

Whatever goes wrong here costs a warning and a compilation, never a failure.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cute_fp8.build.cache_key import Key, must_compile, sources_changed

VARIABLE = "CUTE_FP8_CACHE_DIR"
OFF = ("", "0", "off")
#: What an exported object calls its function.
FUNCTION = "cute_fp8_kernel"
#: The longest wait for another process that compiles the same kernel; then this one does as well.
LOCK_SECONDS = 120.0
#: A temporary file of this age was left by a process that was killed.
STALE_SECONDS = 3600.0

#: At the end of a file: sha256 of all before it, and what kind of file it is.
_FOOTER = struct.Struct("<32s16s")
_MAGIC = b"cute_fp8 kernel1"

#: The DSL keeps global state: one thread at a time compiles, exports or loads.
dsl_lock = threading.RLock()


class Stats(NamedTuple):
    """Kernels that this process loaded from disk (``hits``), had to compile (``misses``), and
    compiled because their file was no good (``rebuilt``, among the misses).
    """

    hits: int = 0
    misses: int = 0
    rebuilt: int = 0


class Size(NamedTuple):
    """What the folder holds."""

    files: int
    bytes: int


_stats = Stats()
_lock = threading.Lock()
#: Folders that could not be written, and what has been warned of.
_read_only: set[Path] = set()
_warned: set[tuple[str, Path]] = set()


# ------------------------------------------------------------------------------ the folder


def location() -> Path | None:
    """The folder, whether it exists or not; None if the variable says no disk."""
    setting = os.environ.get(VARIABLE)
    if setting is not None:
        off = setting.strip().lower() in OFF
        return None if off else Path(os.path.expanduser(setting)).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "cute_fp8" if os.path.isabs(base) else None


def size() -> Size:
    """How many kernels the folder holds, and their bytes."""
    folder, sizes = location(), []
    if folder is not None:
        for path in folder.glob("*.o"):
            with suppress(OSError):
                sizes.append(path.stat().st_size)
    return Size(len(sizes), sum(sizes))


def stats() -> Stats:
    """What this process has asked of the disk so far."""
    return _stats


def _count(**events: int) -> None:
    global _stats
    with _lock:
        _stats = _stats._replace(**{n: getattr(_stats, n) + k for n, k in events.items()})


def _folder() -> Path | None:
    """Where kernels are kept; None where they must be compiled."""
    return None if must_compile() else usable_folder()


def usable_folder() -> Path | None:
    """The folder if it is to be used, made if it is not there; None if not, with one warning."""
    folder = location()
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _ours(folder.stat()):
            raise PermissionError("others can write there; chmod 700, or choose another folder")
        return folder
    except OSError as error:
        warn("use", folder, f"is not used: {error} ({VARIABLE})")
        return None


def _ours(info: os.stat_result) -> bool:
    """Whether nobody but this user, or root, can have written what ``info`` describes."""
    writable_by_others = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return info.st_uid in (os.geteuid(), 0) and not writable_by_others


def warn(what: str, path: Path, text: str) -> None:
    """Warn of one thing about one folder, once in this process."""
    with _lock:
        if (what, path) in _warned:
            return
        _warned.add((what, path))
    warnings.warn(f"cute_fp8: the kernel cache {path} {text}", RuntimeWarning, stacklevel=3)


@contextmanager
def locked(folder: Path, name: str) -> Iterator[bool]:
    """Hold the lock of that name, which is also the leave to write; yields whether that came off.

    It does not where the folder cannot be written, or has no locks, or the holder takes too long.
    """
    if folder in _read_only:
        yield False
        return
    from filelock import FileLock, Timeout  # one of torch's own dependencies

    lock = None
    try:
        lock = FileLock(folder / f"{name}.lock", timeout=LOCK_SECONDS, mode=0o600)
        lock.acquire()
    except Timeout:
        lock = None
        warn("wait", folder, f"is busy: {name[:8]}... was locked for {LOCK_SECONDS:.0f} s")
    except (OSError, RuntimeError) as error:
        lock = None
        _give_up(folder, error)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with suppress(OSError):
                lock.release()


def _give_up(folder: Path, error: Exception) -> None:
    """Write no more to this folder."""
    _read_only.add(folder)
    warn("write", folder, f"gets no new kernels: {error}")


# ------------------------------------------------------------------------------ files


def fetch(key: Key, build: Callable[[], Any]) -> Any:
    """The function of a kernel, loaded from disk; or what ``build`` returns, which goes there."""
    folder = _folder()
    if folder is None:
        return build()
    path = folder / f"{key.digest}.o"
    kernel, _ = _load(path, key)
    if kernel is not None:
        return kernel
    with locked(folder, key.digest) as leave:
        fault = None
        if leave:
            kernel, fault = _load(path, key)  # by the one that held the lock before
            if kernel is not None:
                return kernel
            if fault is not None:
                _set_aside(path, fault)
        compiled = build()
        _count(misses=1, rebuilt=fault is not None)
        if leave:
            _store(path, key, compiled)
    return compiled


def has(key: Key) -> bool:
    """Whether the kernel's file is there and whole."""
    folder = _folder()
    try:
        return folder is not None and _read(folder / f"{key.digest}.o") == key.line
    except (OSError, ValueError):
        return False


@contextmanager
def filling(name: str) -> Iterator[bool]:
    """Be the only process that fills the folder, under that name; yields whether it can be."""
    folder = _folder()
    if folder is None:
        yield False
    else:
        with locked(folder, name) as leave:
            yield leave


def _load(path: Path, key: Key) -> tuple[Any, str | None]:
    """The function in a file, or None, with what is wrong with the file if it is there."""
    try:
        if _read(path) != key.line:
            raise ValueError("holds another kernel")
        with dsl_lock:
            function = _load_object(path)
    except FileNotFoundError:
        return None, None
    except MemoryError:
        return None, None  # no fault of the file's
    except Exception as error:
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]
    _count(hits=1)
    return function, None


def _load_object(path: Path) -> Any:
    from cutlass.cute.runtime import load_module

    return load_module(str(path), enable_tvm_ffi=True)[FUNCTION]


def _read(path: Path) -> bytes:
    """The line of a file that is whole.

    Raises:
        OSError, ValueError: it is not there, not ours, or not whole.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or not _ours(info):
            raise ValueError("is no file that only this user can write")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
    finally:
        os.close(descriptor)
    body, footer = data[: -_FOOTER.size], data[-_FOOTER.size :]
    if not footer.endswith(_MAGIC) or footer != _footer(body):
        raise ValueError("is damaged")
    return body.rpartition(b"\n")[2]


def _footer(body: bytes) -> bytes:
    return _FOOTER.pack(hashlib.sha256(body).digest(), _MAGIC)


def _store(path: Path, key: Key, compiled: Any) -> None:
    """Put a kernel there, unless the sources have been edited meanwhile; its lock is held."""
    if sources_changed():
        return
    temporary = None
    try:
        _remove_stale(path.parent)
        descriptor, name = tempfile.mkstemp(".tmp", f"{key.digest}.", path.parent)  # mode 0600
        os.close(descriptor)
        temporary = Path(name)
        with dsl_lock:
            compiled.export_to_c(name, function_name=FUNCTION)
        with open(temporary, "r+b") as file:
            if not _ours(os.fstat(file.fileno())):
                raise PermissionError("others can write the files in there")
            body = file.read()
            line = b"\n" + key.line
            file.write(line + _footer(body + line))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        if not isinstance(error, Exception):
            raise
        _give_up(path.parent, error)


def _remove_stale(folder: Path) -> None:
    for path in folder.glob("*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def _set_aside(path: Path, fault: str) -> None:
    """Keep a file that is no good, for whoever wants to know, but out of the way."""
    warn("bad", path.parent, f"has a bad file, set aside and compiled anew: {path.name} {fault}")
    try:
        path.replace(path.with_suffix(".bad"))
    except OSError:
        with suppress(OSError):
            path.unlink()
