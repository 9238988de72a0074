"""Result files: read, checked, written whole; and the file that an interrupted sweep goes on from.

A sweep appends the rows of each shape to ``<out>.partial.jsonl`` as they come; the result file
itself is written once, at the end, under another name first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).with_name("schema.json")
#: What tells one measurement from another; ``N`` is absent for producers.
KEY = ("op", "variant", "impl", "M", "N", "K", "epilogue")
#: What must be as it was for a sweep to go on from its partial file.
SAME = ("gpu", "driver", "torch", "dsl", "cute_fp8", "commit", "kernels", "quack")

Row = dict[str, Any]
Key = tuple[Any, ...]


def key_of(row: Row) -> Key:
    """A row's identity. Files older than epilogues have none of them."""
    return tuple(row.get(name, "none" if name == "epilogue" else None) for name in KEY)


def schema_errors(data: Any) -> list[str]:
    """What is wrong with a result, in words, the first few; empty if nothing is."""
    import jsonschema

    checker = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    found = []
    for error in checker.iter_errors(data):
        where = "/".join(map(str, error.absolute_path)) or "the file"
        found.append(f"{where}: {error.message[:200]}")
        if len(found) == 3:
            break
    return found


def load(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: there is none, or it is half-written, or against the schema; one line.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: half-written or no JSON: {error}") from None
    errors = schema_errors(data)
    if errors:
        raise ValueError(f"{path}: not a result of perf.sweep: {errors[0]}")
    return data


def save(path: Path, meta: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write a result file whole or not at all.

    Raises:
        ValueError: it would be against the schema.
    """
    data = {"meta": meta, "rows": list(rows)}
    errors = schema_errors(data)
    if errors:
        raise ValueError(f"{path}: would be against the schema: {'; '.join(errors)}")
    lines = ",\n".join("  " + json.dumps(row) for row in data["rows"])
    text = f'{{"meta": {json.dumps(meta, indent=2)},\n"rows": [\n{lines}\n]}}\n'
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


class Partial:
    """The rows so far of one sweep, on disk.

    Attributes:
        rows: by key; a row that was measured again replaces the old one.
        meta: of the sweep that began the file; None before ``begin``.
        warning: what had to be left out of a file found, or None.
    """

    def __init__(self, out: Path):
        self.path = out.with_name(out.stem + ".partial.jsonl")
        self.rows: dict[Key, Row] = {}
        self.meta: dict[str, Any] | None = None
        self.warning: str | None = None
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        whole = 0
        data = self.path.read_bytes()
        for line in data.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                entry = json.loads(line)
                if self.meta is None:
                    self.meta = entry["meta"]
                else:
                    self.rows[key_of(entry)] = entry
            except (ValueError, KeyError, TypeError):
                self.warning = f"{self.path}: left out its half-written end"
                with self.path.open("r+b") as file:
                    file.truncate(whole)
                break
            whole += len(line)

    def other(self, meta: dict[str, Any]) -> str | None:
        """How the sweep that began the file differs from one with this meta; None if not."""
        for name in SAME:
            had, have = (m.get(name) for m in (self.meta or meta, meta))
            if had != have:
                return f"{name} was {had}, is {have}"
        return None

    def begin(self, meta: dict[str, Any]) -> None:
        """Start the file anew."""
        self.meta, self.rows = meta, {}
        self.path.write_text(json.dumps({"meta": meta}) + "\n", encoding="utf-8")

    def add(self, rows: list[Row]) -> None:
        """Keep the rows of one shape, together."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.rows.update((key_of(row), row) for row in rows)

    def end(self) -> None:
        """The result is written: nothing is left to go on from."""
        self.path.unlink()
