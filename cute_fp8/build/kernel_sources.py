"""Which sources each kernel is traced from, and the digest that tells them from earlier ones.

A result carries the digests of all kernels, in one line; what it says about a kernel holds for as
long as that kernel's own sources stay as they were, whatever else is added beside them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "kernels"
#: What a kernel's module defines and no other.
_KERNEL = "cute.kernel"


@functools.cache
def digests() -> dict[str, str]:
    """Of every kernel, by the name of its module: the head of the digest of its sources."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if _is_kernel(path):
            digest = hashlib.sha256()
            for name in modules_of(path.stem):
                text = (FOLDER / f"{name}.py").read_bytes()
                digest.update(f"{name} {len(text)}\n".encode() + text)
            found[path.stem] = digest.hexdigest()[:12]
    return found


def modules_of(kernel: str) -> list[str]:
    """A kernel's module and every one of ``kernels/`` that it imports, at any remove."""
    found, todo = set(), [kernel]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _imports(FOLDER / f"{name}.py")
    return sorted(found)


def recorded(line: str) -> dict[str, str]:
    """``as_line`` back; empty for a line of another form."""
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


def as_line(of: Mapping[str, str] | None = None) -> str:
    """Digests in one line, as results carry them."""
    return " ".join(f"{name}={digest}" for name, digest in (of or digests()).items())


def _is_kernel(path: Path) -> bool:
    return any(
        isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith(_KERNEL) for decorator in node.decorator_list)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def _imports(path: Path) -> list[str]:
    """The modules of ``kernels/`` that one imports, which is done relatively; but for types."""
    found: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [node.module] if node.module else [alias.name for alias in node.names]
    return found
