"""House rules that ruff has no check for: short files, short functions, documented interfaces."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = 420
FUNCTION_LINES = 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """The name and text of every Python file there. Symlinked folders are not followed."""
    for folder in folders:
        for path, _, names in os.walk(ROOT / folder):
            for name in sorted(names):
                if name.endswith(".py"):
                    file = Path(path) / name
                    yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def public(body: list[ast.stmt]) -> Iterator[Function]:
    """The public functions of a module, and the public methods of its public classes."""
    for node in body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body)


def test_files_are_short() -> None:
    lengths = {n: t.count("\n") for n, t in sources("cute_fp8", "kernels", "tests", "perf")}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = [
        f"{name}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for name, text in sources("cute_fp8", "kernels", "tests", "perf")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function) and node.end_lineno - node.lineno >= FUNCTION_LINES
    ]
    assert long == []


def is_overload(node: ast.stmt) -> bool:
    """One more signature of a function whose docstring stands elsewhere."""
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in decorators)


def test_public_functions_have_docstrings() -> None:
    bare = [
        f"{name}:{node.lineno} {node.name}"
        for name, text in sources("cute_fp8")
        for node in public(ast.parse(text).body)
        if not ast.get_docstring(node) and not is_overload(node)
    ]
    assert bare == []
