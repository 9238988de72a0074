"""Folders of safetensors files: read by name, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from cute_fp8.models.formats import Facts

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
#: safetensors' names of dtypes.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class TensorFolder:
    """The tensors of a folder, each read when it is asked for. A context manager.

    Attributes:
        path: the folder.
        files: the file of each tensor, by the tensor's name.
        config: what ``config.json`` has; empty if there is none.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """
        Raises:
            ValueError: no such folder, no safetensors in it, or an index that names what is not
                there.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"folder: got {str(path)!r}, must be a folder that exists")
        self._open: dict[str, Any] = {}
        self._facts: dict[str, Facts] = {}
        self.config = read_json(self.path / CONFIG) if (self.path / CONFIG).is_file() else {}
        self.files = self._find()

    def _find(self) -> dict[str, str]:
        index = self.path / INDEX
        if index.is_file():
            files: dict[str, str] = dict(read_json(index).get("weight_map", {}))
            for name, file in files.items():
                if not (self.path / file).is_file():
                    raise ValueError(f"{index.name}: got {file!r} for {name}, which is not there")
            here: set[str] = set()
            for file in set(files.values()):
                here |= {name for name in self._names(file) if files.get(name) == file}
            if missing := sorted(set(files) - here):
                raise ValueError(
                    f"{missing[0]}: got no such tensor in {files[missing[0]]}, where the index has "
                    f"it ({len(missing)} missing)"
                )
            return files
        names = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not names:
            raise ValueError(f"folder: got {str(self.path)!r}, must hold *.safetensors files")
        return {name: file for file in names for name in self._names(file)}

    def _names(self, file: str) -> list[str]:
        return list(self._file(file).keys())

    def _file(self, name: str) -> Any:
        if name not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[name] = safe_open(self.path / name, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{name}: half-written or no safetensors: {error}") from None
        return self._open[name]

    def facts(self, name: str) -> Facts | None:
        """Shape and dtype of a tensor; None if there is none.

        Raises:
            TypeError: a dtype that torch has not.
        """
        if name not in self.files:
            return None
        if name not in self._facts:
            part = self._file(self.files[name]).get_slice(name)
            kind = part.get_dtype()
            if kind not in _DTYPES:
                raise TypeError(f"{name}: got dtype {kind}, must be one that torch has")
            self._facts[name] = Facts(tuple(part.get_shape()), _DTYPES[kind])
        return self._facts[name]

    def get(self, name: str) -> Tensor:
        """A tensor, on the CPU, in memory of its own: what maps a file is neither aligned nor safe.

        Raises:
            ValueError: there is none.
        """
        if name not in self.files:
            raise ValueError(f"{name}: got no such tensor in {self.path}, must be there")
        tensor: Tensor = self._file(self.files[name]).get_tensor(name)
        return tensor.clone()

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: half-written or no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: half-written or no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path.name}: got a {type(data).__name__}, must be an object")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + ".part")
    new.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Whole or not at all."""
    from safetensors.torch import save_file

    new = path.with_name(path.name + ".part")
    save_file(dict(tensors), new, metadata={"format": "pt"})
    new.chmod(0o644)  # safetensors lets nobody else read
    os.replace(new, path)


def index_of(files: Mapping[str, str], total: int) -> dict[str, Any]:
    """An index, as transformers writes and reads it."""
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
