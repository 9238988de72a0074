"""A folder of safetensors to one with FP8 weights, file by file, without making the model.

Each file of the source becomes a file of the same name. It is written under another name, read
back, compared with what was to be written, and only then counts as done, in a file of progress that
an interrupted run leaves behind and the next one goes on from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cute_fp8.models.checkpoint import as_stored, block_of
from cute_fp8.models.conversion import HEADS, check_hits, chooser, weight_error
from cute_fp8.models.formats import SCALES, Found, quantization_config, recognise, take
from cute_fp8.models.linear import SCALE, Linear, check_variant, size_refusal
from cute_fp8.models.places import refusal
from cute_fp8.models.report import LayerReport, Report
from cute_fp8.models.tensor_files import (
    CONFIG,
    INDEX,
    TensorFolder,
    index_of,
    read_json,
    write_json,
    write_tensors,
)
from cute_fp8.progress import watched

PROGRESS = "cute_fp8_convert.json"
#: Ends of names of files with weights, which are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
#: In names of matrices that are no linear layer's, or one's that decides too much: embeddings,
#: norms, output heads, routers.
_NO_LINEARS = (
    *HEADS,
    "embed",
    "wte",
    "wpe",
    "norm",
    "position",
    "shared",
    "router",
    "relative_attention_bias",
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def convert_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    variant: str = "per_token",
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> Report:
    """Quantise the linear layers of a checkpoint in safetensors.

    Which matrices are linear layers, transformers says of models that it knows; of others, names
    do. Layers in FP8 already are taken over or, from 128x128 blocks, quantised again. What stays as
    it is is copied, with the config and the tokenizer's files beside it.

    Args:
        source: a folder of safetensors files.
        target: a folder that does not exist, is empty, or is what an interrupted run of the same
            conversion has left.
        variant: ``per_token`` or ``mxfp8``.
        include: globs over names of layers, of which one must match; output heads, too, then.
        exclude: globs of which none may match. One that matches no matrix's name is an error.

    Returns:
        A report with the errors of the weights.

    Raises:
        TypeError, ValueError: an argument breaks a rule above, or a file is wrong; by name.
        RuntimeError: a file could not be written, or does not hold what was written.
    """
    check_variant(variant)
    wanted = (tuple(include), tuple(exclude))
    path = Path(target)
    if path.resolve() == Path(source).resolve():
        raise ValueError(f"target: got {str(target)!r}, must be another folder than the source")
    try:
        with TensorFolder(source) as files:
            job = _Job(files, path, variant, *wanted)
            return job.run()
    except OSError as error:
        raise RuntimeError(f"{error.filename or path}: {error.strerror or error}") from error


@dataclass
class _Job:
    """One conversion.

    Attributes:
        files: the source.
        target: the folder to write.
        variant, include, exclude: as in :func:`convert_folder`.
        found: layers that are in FP8 already.
        reasons: why matrices that could be layers stay; None for those to be quantised.
    """

    files: TensorFolder
    target: Path
    variant: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    found: dict[str, Found] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)

    def run(self) -> Report:
        """All of it."""
        self.block = block_of(self.files.config)
        self._choose()
        done = self._begin()
        names = sorted(set(self.files.files.values()))
        for name in watched(names, "converting", len(names)):
            if not self._is_done(name, done["files"].get(name)):
                done["files"][name] = self._convert_file(name)
                write_json(self.target / PROGRESS, done)
        return self._finish([done["files"][name] for name in names])

    # ------------------------------------------------------------------------------- what to do

    def _choose(self) -> None:
        linears = linear_names(self.files)
        included, excluded = chooser("include", self.include), chooser("exclude", self.exclude)
        nothing = nn.Identity()
        matrices = {
            key.rpartition(".")[0]: facts
            for key in self.files.files
            if key.endswith(".weight")
            and (facts := self.files.facts(key)) is not None
            and len(facts.shape) == 2
        }
        check_hits("include", self.include, matrices)
        check_hits("exclude", self.exclude, matrices)
        for name, facts in matrices.items():
            if (form := recognise(name, self.files.facts, self.block)) is not None:
                self.found[name] = form
                continue
            n, k = facts.shape
            reason = size_refusal(n, k, self.variant)
            if self.include and not included(name, nothing):
                reason = "not included"
            elif excluded(name, nothing):
                reason = "excluded"
            elif (refused := linears.get(name)) is not None:
                reason = refused
            elif facts.dtype not in _FLOATS:
                reason = f"its weight is {facts.dtype}"
            elif name not in linears and not self.include:
                continue  # an embedding or the like, nobody asks
            self.reasons[name] = reason

    def _plan(self) -> dict[str, Any]:
        """What another run must have had in mind, too, for this one to go on from it."""
        source = {}
        for name in sorted(set(self.files.files.values())):
            stat = (self.files.path / name).stat()
            source[name] = [stat.st_size, stat.st_mtime_ns]
        return {
            "source": source,
            "variant": self.variant,
            "include": list(self.include),
            "exclude": list(self.exclude),
        }

    def _begin(self) -> dict[str, Any]:
        """The state of an interrupted run, or a new one's."""
        self.target.mkdir(parents=True, exist_ok=True)
        plan, progress = self._plan(), self.target / PROGRESS
        if not progress.is_file():
            if others := sorted(file.name for file in self.target.iterdir()):
                raise ValueError(
                    f"target: got {str(self.target)!r} with {others[0]} in it, must be empty or "
                    "what an interrupted conversion has left"
                )
            state: dict[str, Any] = {"plan": plan, "files": {}}
            write_json(progress, state)
            return state
        state = read_json(progress)
        for key, value in plan.items():
            if (had := state["plan"].get(key)) != value:
                what = "the source has changed" if key == "source" else f"{key} was {had!r}"
                raise ValueError(
                    f"target: got a half-finished conversion of another kind ({what}), must be of "
                    f"this one: remove {str(self.target)!r}"
                )
        return state

    def _is_done(self, name: str, entry: dict[str, Any] | None) -> bool:
        file = self.target / name
        return entry is not None and file.is_file() and entry["sha256"] == sha256(file)

    # ------------------------------------------------------------------------------- one file

    def _convert_file(self, name: str) -> dict[str, Any]:
        made: dict[str, Tensor] = {}
        layers = []
        for key in (key for key, file in self.files.files.items() if file == name):
            layer, _, last = key.rpartition(".")
            if last in SCALES and layer in self.found:
                continue
            facts = self.files.facts(key)
            is_matrix = last == "weight" and facts is not None and len(facts.shape) == 2
            if is_matrix and (layer in self.found or self.reasons.get(layer, "") is None):
                tensors, report = self._quantise(layer)
                made |= {f"{layer}.{part}": as_stored(t) for part, t in tensors.items()}
                layers.append(report)
                continue
            made[key] = self.files.get(key)
            if is_matrix and layer in self.reasons:
                size = made[key].nbytes
                n, k = made[key].shape
                layers.append(LayerReport(layer, n, k, size, size, reason=self.reasons[layer]))
        write_tensors(self.target / name, made)
        verify(self.target, name, made)
        return {
            "sha256": sha256(self.target / name),
            "tensors": {key: tensor.nbytes for key, tensor in made.items()},
            "layers": [report.as_dict() for report in layers],
        }

    def _quantise(self, name: str) -> tuple[dict[str, Tensor], LayerReport]:
        if name in self.found:
            form = self.found[name]
            variant = form.variant or self.variant
            codes, scale, said = take(name, form, self.files.get, variant, self.block)
            before = codes.nbytes + self.files.get(form.scale).nbytes
            made = Linear.from_quantized(codes, scale)
        else:
            linear = nn.Linear(1, 1, bias=False, device="meta")
            weight = self.files.get(f"{name}.weight")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.out_features, linear.in_features = weight.shape
            try:
                made = Linear.from_linear(linear, self.variant)
            except ValueError as error:
                raise ValueError(f"{name}.weight: {error}") from None
            before = weight.nbytes
            said = {"variant": self.variant, **weight_error(weight, made)}
        n, k = made.weight.shape
        after = made.weight.nbytes + made.weight_scale.nbytes
        report = LayerReport(name, n, k, before, after, **said)
        return {"weight": made.weight.detach(), SCALE: made.weight_scale.detach()}, report

    # ------------------------------------------------------------------------------- the end

    def _finish(self, entries: list[dict[str, Any]]) -> Report:
        """Index, config, and the files beside the weights; then nothing is left to go on from."""
        names = sorted(set(self.files.files.values()))
        sizes = {key: size for entry in entries for key, size in entry["tensors"].items()}
        where = {
            key: n for n, entry in zip(names, entries, strict=True) for key in entry["tensors"]
        }
        layers = [_report(layer) for entry in entries for layer in entry["layers"]]
        if len(names) > 1:
            write_json(self.target / INDEX, index_of(where, sum(sizes.values())))
        for file in sorted(self.files.path.iterdir()):
            copied = file.is_file() and not file.name.endswith(_WEIGHTS)
            if copied and file.name not in (INDEX, CONFIG, PROGRESS):
                shutil.copyfile(file, self.target / file.name)
        variants = {layer.name: layer.variant for layer in layers if layer.variant is not None}
        config = {key: v for key, v in self.files.config.items() if key != "quantization_config"}
        ignore = [layer.name for layer in layers if layer.variant is None]
        ignore += sorted(name for name in self._heads() if name not in {*ignore, *variants})
        if variants:
            config["quantization_config"] = quantization_config(variants, ignore)
        write_json(self.target / CONFIG, config)
        (self.target / PROGRESS).unlink()
        return Report(tuple(layers))

    def _heads(self) -> set[str]:
        names = {key.rpartition(".")[0] for key in self.files.files if key.endswith(".weight")}
        return {name for name in names if name.rpartition(".")[2] in HEADS}


def _report(data: dict[str, Any]) -> LayerReport:
    data = {key: value for key, value in data.items() if key != "quantised"}
    return LayerReport(**data | {"notes": tuple(data["notes"])})


def linear_names(files: TensorFolder) -> dict[str, str | None]:
    """What are linear layers in a checkpoint, output heads apart, by name; and why one has to stay
    what it is, as far as that is known.
    """
    weights = {key.removesuffix(".weight") for key in files.files if key.endswith(".weight")}
    known = _names_in_transformers(files)
    if known is not None and len(known.keys() & weights) * 2 >= len(known):
        return {name: why for name, why in known.items() if name.rpartition(".")[2] not in HEADS}
    return {name: None for name in weights if not any(part in name for part in _NO_LINEARS)}


def _names_in_transformers(files: TensorFolder) -> dict[str, str | None] | None:
    """Of the model that the config names; None if transformers does not know it or is not here."""
    architectures = files.config.get("architectures") or []
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(files.path, local_files_only=True)
        make: Callable[[Any], nn.Module] = getattr(transformers, str(architectures[0]))
        with torch.device("meta"):
            model = make(config)
        return {
            name: refusal(model, name)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
    except Exception:  # whatever it is, names will do
        return None


def verify(folder: Path, name: str, made: dict[str, Tensor]) -> None:
    """Read a file back.

    Raises:
        RuntimeError: it does not hold what was written.
    """
    from safetensors import safe_open

    with safe_open(folder / name, framework="pt") as file:
        keys = set(file.keys())
        if keys != set(made):
            raise RuntimeError(f"{name}: got other tensors back, must hold what was written")
        for key, tensor in made.items():
            back = file.get_tensor(key)
            same = back.dtype == tensor.dtype and back.shape == tensor.shape
            if not (same and torch.equal(_bytes(back), _bytes(tensor))):
                raise RuntimeError(f"{name}: got another {key} back, must hold what was written")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def sha256(path: Path) -> str:
    """Of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()
