"""Is the CuTe DSL installed as its wheels say? A mixture of them breaks it in odd ways.

The DSL is several distributions that fill one folder: ``nvidia-cutlass-dsl-libs-base``, ``-core``,
and one per CUDA version, ``-cu12`` and ``-cu13``. Since 4.8 the last two live side by side. Wheels
of different versions, or older ones, write the same paths with different content: the order of
installation decides what is there, and removing one takes files from the other. The symptoms are a
``TypeError`` at import, or PTX that does not assemble.

Each installed distribution has a RECORD of its files' sizes and hashes; :func:`check` compares.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

FAMILY = "nvidia-cutlass-dsl"
#: The versions that this package is made for, as in ``pyproject.toml``.
SUPPORTED = ">=4.8,<4.9"
#: Faults that are printed; the rest is counted.
SHOWN = 10


@dataclass(frozen=True)
class Claim:
    """One line of a RECORD: what ``owner``, such as ``libs-base``, says about a file."""

    owner: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Wheels:
    """What :func:`check` found. Prints as one line, or as the faults and the way out.

    Attributes:
        versions: of each installed distribution of the family, by name.
        faults: what is wrong, a line each; empty is a sound installation.
        repair: the command that mends it; None where there is nothing to mend.
    """

    versions: dict[str, str]
    faults: tuple[str, ...]
    repair: str | None

    def __str__(self) -> str:
        names = ", ".join(_short_name(name) for name in self.versions if name != FAMILY)
        if self.repair is None:
            return f"ok: every file is its wheel's ({names})" if self.versions else "not installed"
        lines = [f"mixed or damaged ({names}):", *(f"  {fault}" for fault in self.faults[:SHOWN])]
        if len(self.faults) > SHOWN:
            lines.append(f"  and {len(self.faults) - SHOWN} more")
        return "\n".join([*lines, f"mend it with: {self.repair}"])


def version(package: str) -> str:
    """A distribution's version, or ``not installed``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def check(path: Sequence[str] | None = None) -> Wheels:
    """Compare the installed files of the DSL with the RECORDs of its wheels.

    Args:
        path: folders to search for distributions; by default ``sys.path``.
    """
    installed = _family(path)
    versions = {name: found.version for name, found in sorted(installed.items())}
    faults = []
    if len(set(versions.values())) > 1:
        pairs = ", ".join(f"{_short_name(name)} {version}" for name, version in versions.items())
        faults.append(f"versions differ: {pairs}")
    claims: dict[Path, list[Claim]] = {}
    for name, distribution in sorted(installed.items()):
        for file, claim in _claims(name, distribution):
            claims.setdefault(file, []).append(claim)
    for file, owners in sorted(claims.items()):
        fault = file_fault(file, owners)
        if fault is not None:
            faults.append(f"{_short(file)}: {fault}")
    return Wheels(versions, tuple(faults), repair_command(list(versions)) if faults else None)


def file_fault(file: Path, claims: Sequence[Claim]) -> str | None:
    """What is wrong with an installed file, given everyone who claims it; None if nothing is.

    Two distributions may claim a path, as long as they agree on what is there.
    """
    names = " and ".join(claim.owner for claim in claims)
    if not file.is_file():
        return f"missing, belongs to {names}"
    content = _Content(file)
    true = [claim.owner for claim in claims if content.matches(claim)]
    if len(true) == len(claims):
        return None
    if len(claims) == 1:
        return f"not what the wheel of {names} has"
    winner = " and ".join(true) if true else "neither"
    return f"claimed by {names}, and is what {winner} has"


def repair_command(names: Sequence[str]) -> str:
    """The command line that replaces these distributions by a sound set.

    All are removed first: pip, which replaces one after the other, would let the removal of a later
    one take files that an earlier one has just brought.
    """
    extra = "[cu13]" if f"{FAMILY}-libs-cu13" in names else ""
    remove = " ".join(sorted({*names, FAMILY}))
    return (
        f"python -m pip uninstall -y {remove} && python -m pip install '{FAMILY}{extra}{SUPPORTED}'"
    )


class _Content:
    """A file's size and, read only when the size fits, its hash."""

    def __init__(self, file: Path):
        self._file = file
        self._size = file.stat().st_size
        self._sha256: str | None = None

    def matches(self, claim: Claim) -> bool:
        if self._size != claim.size:
            return False
        if self._sha256 is None:
            with self._file.open("rb") as stream:
                digest = hashlib.sha256()
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
            self._sha256 = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
        return self._sha256 == claim.sha256


def _family(path: Sequence[str] | None) -> dict[str, metadata.Distribution]:
    """The DSL's distributions by name; of several copies the one that Python would import."""
    found: dict[str, metadata.Distribution] = {}
    every = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    for distribution in every:
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name == FAMILY or name.startswith(f"{FAMILY}-"):
            found.setdefault(name, distribution)
    return found


def _claims(name: str, distribution: metadata.Distribution) -> Iterator[tuple[Path, Claim]]:
    """A distribution's files with a recorded hash, metadata and scripts left out.

    Read here, since ``Distribution.files`` leaves out missing files from Python 3.12 on.
    """
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if len(row) != 3 or not row[1].startswith("sha256=") or not row[2].isdigit():
            continue
        if row[0].startswith("..") or ".dist-info/" in row[0]:
            continue
        file = Path(str(distribution.locate_file(row[0])))
        yield (
            file,
            Claim(_short_name(name), row[1].removeprefix("sha256=").rstrip("="), int(row[2])),
        )


def _short_name(name: str) -> str:
    return name.removeprefix(f"{FAMILY}-")


def _short(file: Path) -> str:
    """The path from the DSL's folder on."""
    parts = file.parts
    start = parts.index("nvidia_cutlass_dsl") if "nvidia_cutlass_dsl" in parts else -1
    return "/".join(parts[start:])
