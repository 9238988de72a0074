"""What a compiled kernel depends on, and so what its file on disk is named after."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass

from cute_fp8.build import wheels
from cute_fp8.build.kernel_sources import FOLDER
from cute_fp8.kernels.configs import Config

#: What compiles and loads.
PACKAGES = (
    "nvidia-cutlass-dsl",
    *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
    "apache-tvm-ffi",
)
#: Variables that ask the DSL to show or keep what it does, which only a compilation can do.
_SHOWING = re.compile(r"CUTE_DSL_(KEEP\w*|PRINT_\w+|DRYRUN|NO_CACHE|DISABLE_FILE_CACHING)$")
#: Variables of the DSL that do not change what it compiles.
_HARMLESS = re.compile(r"CUTE_DSL_(ARCH|CACHE_DIR|DUMP_DIR|LIBS|LOG_\w+)$")
#: What a compiler that compiles for this very CPU, as the DSL's does, looks at.
_CPU = re.compile(
    r"(vendor_id|cpu family|model|model name|flags|CPU (implementer|architecture|variant|part)"
    r"|Features)\s*:"
)


@dataclass(frozen=True)
class Key:
    """Everything that a compiled kernel depends on, as one line of JSON."""

    line: bytes

    @functools.cached_property
    def digest(self) -> str:
        """The name of the kernel's file."""
        return hashlib.sha256(self.line).hexdigest()


def key_of(config: Config, target: str, options: str) -> Key:
    """The key of a kernel for ``target``, compiled with the DSL's ``options``.

    Raises:
        ImportError: there is no DSL.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and not _HARMLESS.match(name)
    }
    parts = {
        "kernel": config.name,
        "config": {"type": type(config).__name__, **asdict(config)},
        "target": target,
        "options": options,
        "variables": variables,
        **_surroundings(),
    }
    return Key(json.dumps(parts, sort_keys=True).encode())


@functools.cache
def _surroundings() -> dict[str, str]:
    """What all kernels of this process depend on; read once."""
    from cutlass import CUDA_VERSION

    from cute_fp8 import __version__

    return {
        "cute-fp8": __version__,
        "sources": digest_of_sources(),
        **{package: wheels.version(package) for package in PACKAGES},
        "cuda": f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": _digest_of_cpu(),
    }


def sources_changed() -> bool:
    """Whether what is traced has been edited since this process made its first key.

    What it compiles then may be of either state, and belongs under no key.
    """
    return _surroundings()["sources"] != digest_of_sources()


def digest_of_sources() -> str:
    """Of everything that is traced: the kernels' sources."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(FOLDER).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _digest_of_cpu() -> str:
    """Of the CPU's model and features: an exported object's host code is for this very CPU."""
    digest = hashlib.sha256()
    with suppress(OSError), open("/proc/cpuinfo", "rb") as lines:
        for line in lines:
            if not line.strip():
                break  # the next core
            if _CPU.match(line.decode(errors="replace")):
                digest.update(line)
    return digest.hexdigest()[:16]


def must_compile() -> bool:
    """Whether a variable asks the DSL for something that no kernel on disk can give."""
    return any(map(_SHOWING.match, os.environ))
