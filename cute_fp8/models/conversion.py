"""A model's linear layers in FP8, by one call, with a report of what that cost."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cute_fp8.accuracy import activation_error, near_lossless
from cute_fp8.models.fusing import Fuse, check_fuse
from cute_fp8.models.fusing import fuse as fuse_layers
from cute_fp8.models.linear import Linear, check_variant, size_refusal
from cute_fp8.models.model_config import tell_config
from cute_fp8.models.places import linear_places, refusal, replace
from cute_fp8.models.report import LayerReport, Report
from cute_fp8.numerics import dequantize_fp8, dequantize_mxfp8
from cute_fp8.progress import watched

#: A glob, a compiled regular expression (searched for), a function of name and module, or several.
LayerFilter = str | re.Pattern[str] | Callable[[str, nn.Module], bool]
LayerFilters = LayerFilter | Iterable[LayerFilter] | None
#: Rows of each layer's input that it is judged on; of more, every so-manieth is taken.
SAMPLE_ROWS = 1024
#: Names of output heads, which stay unless they are included.
HEADS = ("lm_head", "output_projection", "embed_out")


def convert(
    model: nn.Module,
    *,
    include: LayerFilters = None,
    exclude: LayerFilters = None,
    variant: str = "per_token",
    min_rows: int | None = None,
    sample_inputs: Any = None,
    fuse: Fuse = True,
) -> Report:
    """Replace a model's ``nn.Linear`` by :class:`cute_fp8.Linear`, in place, one by one.

    A layer stays as it is, and the report says why, if it is not chosen, if its N or K do not fit,
    if its weight is shared, not finite or read by a module around it, or if on the sample inputs
    its FP8 output misses the near-lossless tier. An output head (``lm_head`` and the like) stays
    unless ``include`` names it.

    Args:
        model: on any device, which it stays on. At no time is there more than one layer's weight
            twice.
        include: which layers, by their names: a glob (``"*.mlp.*"``), a compiled regular
            expression, a predicate ``(name, module) -> bool``, or several of these. None: all.
        exclude: which of them not, likewise. A glob or expression that matches none is an error.
        variant: ``per_token`` or ``mxfp8``.
        min_rows: layers that see fewer rows of the sample inputs stay: few rows cost a weight's
            reading, whatever its format, and the quantiser's launch comes on top.
        sample_inputs: what the model is called with once, to judge each layer on what it sees: a
            tensor, a tuple of positional or a mapping of keyword arguments; or a list of these.
        fuse: ``"projections"`` makes q|k|v and gate|up one GEMM each in decoders that are known
            (:data:`cute_fp8.models.fusing.DECODERS`); True also makes each of their layers a
            decoder block, where a block computes what it does. False, as tensor parallelism wants
            it, leaves everything apart.

    Returns:
        The report: ``print(report.table())``, ``report.save_json(path)``, ``report.plot(path)``.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; raised before any layer is replaced.
        RuntimeError: called while a CUDA graph is being captured.
    """
    check_variant(variant)
    check_fuse(fuse)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, must be an nn.Module")
    if type(model) is nn.Linear:
        raise ValueError("model: got an nn.Linear, must contain it: use Linear.from_linear")
    named, include, exclude = include is not None, _several(include), _several(exclude)
    chosen, excluded = chooser("include", include), chooser("exclude", exclude)
    if min_rows is not None and sample_inputs is None:
        raise ValueError(f"min_rows: got {min_rows} without sample_inputs, must come with them")
    names = list(linear_places(model))
    check_hits("include", include, names)
    check_hits("exclude", exclude, names)
    linears = {
        name: m
        for name, m in linear_places(model).items()
        if isinstance(m, nn.Linear) and not isinstance(m, Linear) and not is_lazy(m.weight)
    }
    reasons = _reasons(model, linears, chosen, excluded, named, variant)
    samples: dict[str, Tensor] = {}
    rows: dict[str, int] = {}
    if sample_inputs is not None:
        wanted = {name: m for name, m in linears.items() if name not in reasons}
        samples, rows = _sample(model, wanted, sample_inputs)
    layers = []
    for name in watched(list(linears), "converting", len(linears)):
        reason, linear = reasons.get(name), linears.pop(name)
        if reason is None and min_rows is not None and rows.get(name, 0) < min_rows:
            reason = f"sees {rows.get(name, 0)} rows, fewer than min_rows = {min_rows}"
        layers.append(_convert_layer(model, name, linear, variant, reason, samples.pop(name, None)))
        del linear  # the only reference to a weight that may be gone from the model
    fused = fuse_layers(model, fuse)
    return Report.of(layers, fused, tell_config(model))


def chooser(argument: str, choices: LayerFilters) -> Callable[[str, nn.Module], bool]:
    """Whether a name and a module match any of the choices; ``argument`` is what an error names.

    Raises:
        TypeError: a choice of another type.
    """
    every = _several(choices)
    for choice in every:
        if not isinstance(choice, (str, re.Pattern)) and not callable(choice):
            raise TypeError(
                f"{argument}: got {type(choice).__name__}, must be a glob, a compiled regular "
                "expression, a function of name and module, or several of these"
            )
    return lambda name, module: any(_hits(choice, name, module) for choice in every)


def check_hits(argument: str, choices: LayerFilters, names: Collection[str]) -> None:
    """Raise ``ValueError``, naming the argument, at a glob or expression that no name matches."""
    for choice in _several(choices):
        if not isinstance(choice, (str, re.Pattern)):
            continue
        if not any(_hits(choice, name, None) for name in names):
            said = choice if isinstance(choice, str) else choice.pattern
            raise ValueError(f"{argument}: got {said!r}, must match the name of a linear layer")


def _several(choices: LayerFilters) -> Sequence[Any]:
    if choices is None:
        return []
    if isinstance(choices, (str, re.Pattern)) or not isinstance(choices, Iterable):
        return [choices]
    return list(choices)


def _hits(choice: Any, name: str, module: nn.Module | None) -> bool:
    if isinstance(choice, str):
        return fnmatch.fnmatchcase(name, choice)
    if isinstance(choice, re.Pattern):
        return choice.search(name) is not None
    return bool(choice(name, module))


def _reasons(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    chosen: Callable[[str, nn.Module], bool],
    excluded: Callable[[str, nn.Module], bool],
    named: bool,
    variant: str,
) -> dict[str, str]:
    """Why layers stay, as far as that can be said without an input."""
    found: dict[str, str] = {}
    heads = {id(m) for m in _output_heads(model)}
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, linear in linears.items():
        weight = linear.weight
        others = [o for o in owners.get(id(weight), []) if o != f"{name}.weight"]
        sizes = size_refusal(linear.out_features, linear.in_features, variant)
        is_head = id(linear) in heads or name.rpartition(".")[2] in HEADS
        if named and not chosen(name, linear):
            found[name] = "not included"
        elif excluded(name, linear):
            found[name] = "excluded"
        elif (refused := refusal(model, name)) is not None:
            found[name] = refused
        elif others:
            found[name] = f"shares its weight with {others[0].removesuffix('.weight')}"
        elif is_head and not named:
            found[name] = "an output head, which stays unless it is included by name"
        elif sizes is not None:
            found[name] = sizes
        elif weight.device.type == "meta":
            found[name] = "has no values, for it is on the meta device"
        elif not weight.is_floating_point() or weight.dtype is torch.float64:
            found[name] = f"its weight is {weight.dtype}"
    return found


def _output_heads(model: nn.Module) -> list[nn.Module]:
    """What transformers calls a model's output embeddings."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        head = None
    return [] if head is None else [head]


# ------------------------------------------------------------------------------------- sampling


def _sample(
    model: nn.Module, linears: Mapping[str, nn.Module], inputs: Any
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Rows of what each layer sees, and how many it saw in its largest call."""
    seen: dict[str, list[Tensor]] = {}
    rows: dict[str, int] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            x = x.detach().reshape(-1, x.shape[-1])
            rows[name] = max(rows.get(name, 0), len(x))
            step = -(-len(x) // SAMPLE_ROWS) or 1
            seen.setdefault(name, []).append(x[::step].clone())

        return hook

    hooks = [
        module.register_forward_pre_hook(keep(name), with_kwargs=True)
        for name, module in linears.items()
    ]
    try:
        with torch.no_grad(), _evaluating(model):
            for call in inputs if isinstance(inputs, list) else [inputs]:
                if isinstance(call, Tensor):
                    model(call)
                elif isinstance(call, Mapping):
                    model(**call)
                elif isinstance(call, tuple):
                    model(*call)
                else:
                    raise TypeError(
                        f"sample_inputs: got {type(call).__name__}, must be a tensor, a tuple, a "
                        "mapping, or a list of these"
                    )
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _thinned(torch.cat(parts)) for name, parts in seen.items()}, rows


def _thinned(x: Tensor) -> Tensor:
    return x[:: -(-len(x) // SAMPLE_ROWS) or 1]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout; every module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


# ------------------------------------------------------------------------------------- one layer


@torch.no_grad()
def _convert_layer(
    model: nn.Module,
    name: str,
    linear: nn.Linear,
    variant: str,
    reason: str | None,
    x: Tensor | None,
) -> LayerReport:
    """Quantise, judge, and replace unless there is, or turns up, a reason not to."""
    weight = linear.weight.detach()
    facts: dict[str, Any] = {"name": name, "bytes_before": weight.nbytes}
    facts |= dict(zip("nk", weight.shape, strict=True))
    layer = None
    if reason is None:
        try:
            layer = Linear.from_linear(linear, variant)
        except ValueError as error:
            reason = str(error)
    if layer is not None:
        facts |= weight_error(weight, layer)
        if x is not None and len(x):
            facts |= _judge(linear, layer, x)
            if not facts["verdict"].passed:
                reason = f"misses the tier: {facts['verdict']}"
    if layer is None or reason is not None:
        return LayerReport(**facts, reason=reason, bytes_after=weight.nbytes)
    replace(model, name, layer)
    return LayerReport(**facts, bytes_after=layer.weight_bytes, variant=variant)


def weight_error(weight: Tensor, layer: Linear) -> dict[str, Any]:
    """Errors of the weight alone, some rows at a time: in fp32 a layer is twice as large."""
    step = max(1, (1 << 24) // weight.shape[1])
    error, size = [], []
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        before = weight[part].to(torch.float32)
        error.append((dequantized(layer, part) - before).square().sum(dim=1))
        size.append(before.square().sum(dim=1))
    errors, sizes = torch.cat(error), torch.cat(size)
    worst = (errors / sizes).masked_fill(errors == 0, 0.0).max().sqrt()
    total = float(sizes.sum())
    return {
        "weight_rel_l2": (float(errors.sum()) / total) ** 0.5 if total else 0.0,
        "worst_channel_rel_l2": float(worst),
    }


def dequantized(layer: Linear, rows: slice = slice(None)) -> Tensor:
    """Rows of a layer's weight in fp32, as its codes and scales have it."""
    codes, scale = layer.weight.detach()[rows], layer.weight_scale.detach()[rows]
    if layer.variant == "mxfp8":
        return dequantize_mxfp8(codes, scale, torch.float32)
    return dequantize_fp8(codes, scale, torch.float32)


def _judge(linear: nn.Linear, layer: Linear, x: Tensor) -> dict[str, Any]:
    """Errors on the layer's own input. A NaN among the samples fails the tier, and so the layer."""
    x = x.to(linear.weight.dtype)
    error = activation_error(x, layer.variant)
    return {
        "m": len(x),
        "activation_rel_l2": error["activation_rel_l2"],
        "activation_crest": error["activation_crest"],
        "verdict": near_lossless(layer(x), linear(x)),
    }
