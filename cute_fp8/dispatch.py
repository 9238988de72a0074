"""The dispatch table: which route serves an op on a GPU, keyed by compute capability.

One ordered table. ``select`` walks it and takes the first entry whose backend, capability and
predicate all admit the problem; ``explain`` tells the same walk in words. To add a kernel, add an
entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_fp8 import gpus
from cute_fp8.decoder import problem as block_problem
from cute_fp8.decoder.problem import (
    BlockProblem,
    mlp_refusal,
    mlp_refusal_on_hopper,
    projection_refusal,
    projection_refusal_on_hopper,
)
from cute_fp8.gemms import problem as gemm_problem
from cute_fp8.gemms import torch_backend
from cute_fp8.gemms.choice import Pick
from cute_fp8.gemms.problem import GemmProblem, check_gemm
from cute_fp8.gemms.selection import Selection, select_config
from cute_fp8.kernels.config import SMEM_LIMIT_SM120
from cute_fp8.kernels.config_sm90 import SMEM_LIMIT_SM90
from cute_fp8.kernels.configs import FusedConfig
from cute_fp8.kernels.row_config import RowConfig
from cute_fp8.rows import problem as row_problem
from cute_fp8.rows import selection as row_selection
from cute_fp8.rows import view as row_view
from cute_fp8.rows.problem import RowProblem
from cute_fp8.settings import Settings, check_backend, current
from cute_fp8.targets import Capability, capability_of_device, check_capability, target_of

SM120_TARGETS = ("sm_120a", "sm_121a")
#: Capability patterns; None stands for any minor version.
SM120_FAMILY = ((12, None),)
HOPPER = ((9, 0),)
TORCH_FP8 = ((8, 9), (9, 0), (10, None))
TORCH_MXFP8 = ((10, None), (12, None))
#: Row kernels need the conversion to e4m3, and a target that they are compiled for.
ROW_KERNELS = ((8, 9), (9, 0), (10, 0), (12, None))
ROW_TARGETS = ("sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a", "sm_120f")
ANY = None

Problem = GemmProblem | RowProblem | BlockProblem


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes:
        op, variant: what it computes, e.g. ``gemm``, ``per_token``.
        backend: the backend that ``use`` names it by: ``cute``, ``stand-in``, ``torch``,
            ``reference``.
        kernel: the function or kernel that runs.
        capabilities: ``(major, minor)`` patterns, or None for every device, CPUs included.
        refusal: why it does not serve a problem, or None.
        targets: what the kernel is compiled for; empty for what is not ours to compile.
        on_request: passed over unless ``use`` names its backend.
    """

    op: str
    variant: str
    backend: str
    kernel: str
    capabilities: tuple[tuple[int, int | None], ...] | None
    refusal: Callable[[Any], str | None]
    targets: tuple[str, ...] = ()
    on_request: bool = False

    @property
    def name(self) -> str:
        """As ``explain`` prints it."""
        return f"{self.backend}:{self.kernel}"

    def capability_text(self) -> str:
        """Its capability patterns in words, e.g. ``9.0, 12.x``; ``any`` for every device."""
        patterns = self.capabilities or ()
        return ", ".join(f"{a}.{'x' if b is None else b}" for a, b in patterns) or "any"

    def serves(self, capability: Capability | None) -> bool:
        """Whether a device of this capability (None: no CUDA GPU) is one of the entry's."""
        if self.capabilities is ANY:
            return True
        return capability is not None and any(
            capability[0] == major and minor in (None, capability[1])
            for major, minor in self.capabilities
        )


def _always(problem: Problem) -> str | None:
    return None


#: In the order in which they are tried, for each of the ops.
_GEMM = (
    Entry("gemm", "per_token", "cute", "gemm_sm120", SM120_FAMILY, _always, SM120_TARGETS),
    Entry("gemm", "per_token", "cute", "gemm_sm90", HOPPER, _always, ("sm_90a",)),
    # It is there to run the sm_120 kernel's code on a Hopper GPU, not for speed.
    Entry("gemm", "per_token", "stand-in", "gemm_sm120", HOPPER, _always, ("sm_90a",), True),
    Entry("gemm", "per_token", "torch", "rowwise", TORCH_FP8, torch_backend.rowwise_refusal),
    Entry("gemm", "per_token", "torch", "tensorwise", TORCH_FP8, torch_backend.tensorwise_refusal),
    Entry("gemm", "per_token", "reference", "gemm", ANY, _always),
    Entry("gemm", "mxfp8", "cute", "gemm_sm120", SM120_FAMILY, _always, SM120_TARGETS),
    Entry("gemm", "mxfp8", "stand-in", "gemm_sm120", HOPPER, _always, ("sm_90a",), True),
    Entry("gemm", "mxfp8", "torch", "mxfp8", TORCH_MXFP8, torch_backend.mxfp8_refusal),
    Entry("gemm", "mxfp8", "reference", "gemm", ANY, _always),
)
_ROWS = (
    Entry("", "", "cute", "row_quantize", ROW_KERNELS, _always, ROW_TARGETS),
    Entry("", "", "reference", "rows", ANY, _always),
)
_BLOCKS = (
    Entry("rope_append", "any", "cute", "rope_append", ROW_KERNELS, _always, ROW_TARGETS),
    Entry("rope_append", "any", "reference", "reference", ANY, _always),
    Entry(
        "projection",
        "per_token",
        "cute",
        "projection",
        SM120_FAMILY,
        projection_refusal,
        SM120_TARGETS,
    ),
    Entry(
        "projection",
        "per_token",
        "cute",
        "projection",
        HOPPER,
        projection_refusal_on_hopper,
        ("sm_90a",),
    ),
    Entry("projection", "per_token", "reference", "separate_launches", ANY, _always),
    Entry("decoder_mlp", "per_token", "cute", "mlp", SM120_FAMILY, mlp_refusal, SM120_TARGETS),
    Entry("decoder_mlp", "per_token", "cute", "mlp", HOPPER, mlp_refusal_on_hopper, ("sm_90a",)),
    # Each by its own route.
    Entry("decoder_mlp", "per_token", "reference", "separate_launches", ANY, _always),
)
TABLE = (
    *_GEMM,
    *(replace(entry, op="gemm_gated") for entry in _GEMM),
    *(
        replace(entry, op=op, variant=variant)
        for op in row_problem.OPS
        for variant in ("per_token", "mxfp8")
        for entry in _ROWS
    ),
    *_BLOCKS,
)
OPS = tuple(dict.fromkeys(entry.op for entry in TABLE))


@dataclass(frozen=True)
class Route:
    """What ``select`` decided: the entry, and for a CuTe kernel its target and what was picked."""

    entry: Entry
    target: str | None = None
    selection: Selection | None = None
    rows: RowConfig | None = None
    block: FusedConfig | None = None

    @property
    def pick(self) -> Pick | None:
        """The kernel of a GEMM's CuTe route, and its number of splits."""
        return None if self.selection is None else self.selection.chosen.pick


@dataclass(frozen=True)
class Explanation:
    """A walk through the table. Prints as a short text.

    ``refusal`` is why a pinned configuration cannot serve the problem; there is no route then.
    """

    problem: Problem
    capability: Capability | None
    route: Route | None
    refused: tuple[tuple[Entry, str], ...]
    refusal: str | None = None

    def __str__(self) -> str:
        p = self.problem
        where = (
            "no CUDA GPU"
            if self.capability is None
            else "compute capability {}.{}".format(*self.capability)
        )
        what = f"M={p.m} K={p.k}"
        if isinstance(p, GemmProblem):
            what = f"M={p.m} N={p.n} K={p.k}, out {p.out_dtype}"
        lines = [f"{p.op} {p.variant}, {what}, {where}"]
        lines += [f"  refused {entry.name}: {reason}" for entry, reason in self.refused]
        if self.refusal is not None:
            lines.append(f"  refused the pinned {self.refusal}")
        if self.route is None:
            return "\n".join([*lines, "  no route"])
        lines.append(f"  takes   {self.route.entry.name}")
        if self.route.block is not None:
            lines[-1] += f" for {self.route.target}, {self.route.block.name}"
        if self.route.rows is not None:
            config = self.route.rows
            threads = f"{config.shape.threads} threads a row"
            lines[-1] += f" for {self.route.target}, {threads}, {config.view}"
        if self.route.pick is not None and self.route.selection is not None:
            lines[-1] += f" for {self.route.target}, config {self.route.pick.name}"
            lines += [f"          {line}" for line in self.route.selection.lines()]
        return "\n".join(lines)


def walk(
    problem: Problem,
    capability: Capability | None,
    settings: Settings,
    gpu: gpus.Gpu | None = None,
) -> Explanation:
    """Walk the table for a problem of ``problem.variant``.

    ``route`` is None if nothing serves it.

    Args:
        gpu: whose times are predicted; by default the problem's device, or a typical GPU of the
            capability if that is another's.
    """
    if isinstance(problem, RowProblem | BlockProblem):
        # What is pinned is the GEMM's backend; a chain of ops must run under it as a whole.
        plain = settings.backend in ("torch", "reference")
        settings = settings._replace(backend="reference" if plain else "auto")
    refused: list[tuple[Entry, str]] = []
    for entry in TABLE:
        if entry.op != problem.op or entry.variant != problem.variant:
            continue
        reason = _refusal(entry, problem, capability, settings)
        if reason is None:
            try:
                route = _route(entry, problem, capability, settings, gpu)
            except ValueError as refusal:
                return Explanation(problem, capability, None, tuple(refused), str(refusal))
            return Explanation(problem, capability, route, tuple(refused))
        refused.append((entry, reason))
    return Explanation(problem, capability, None, tuple(refused))


def select(problem: Problem, settings: Settings) -> Route:
    """The route of a problem on its own device.

    Raises:
        RuntimeError: the pinned backend does not serve it; the message says why.
        ValueError: the pinned configuration does not.
    """
    explanation = walk(problem, capability_of_device(problem.device), settings)
    if explanation.refusal is not None:
        raise ValueError(explanation.refusal)
    if explanation.route is None:
        reasons = "; ".join(f"{entry.name}: {reason}" for entry, reason in explanation.refused)
        raise RuntimeError(
            f"backend: got {settings.backend!r}, must be one that serves this call ({reasons})"
        )
    return explanation.route


def _refusal(
    entry: Entry, problem: Problem, capability: Capability | None, settings: Settings
) -> str | None:
    if settings.backend not in ("auto", entry.backend):
        return f"backend {settings.backend!r} was asked for"
    if not entry.serves(capability):
        wanted = entry.capability_text()
        if capability is None:
            return f"no CUDA GPU, must be of compute capability {wanted}"
        return f"compute capability is {capability[0]}.{capability[1]}, must be {wanted}"
    if entry.on_request and settings.backend == "auto":
        return f"only on request, use(backend={entry.backend!r})"
    return entry.refusal(problem)


def _route(
    entry: Entry,
    problem: Problem,
    capability: Capability | None,
    settings: Settings,
    gpu: gpus.Gpu | None,
) -> Route:
    if not entry.targets or capability is None:
        return Route(entry)
    pdl = settings.pdl and capability >= (9, 0)
    if isinstance(problem, RowProblem):
        return Route(entry, target_of(capability), rows=row_selection.config_of(problem, pdl))
    if gpu is None:
        here = capability_of_device(problem.device) == capability
        gpu = gpus.of_device(problem.device) if here else gpus.of_capability(capability)
    if isinstance(problem, BlockProblem):
        smem = SMEM_LIMIT_SM90 if capability == (9, 0) else SMEM_LIMIT_SM120
        return Route(entry, target_of(capability), block=problem.config(gpu.sms, smem, pdl))
    selection = select_config(problem, gpu, settings.choice, entry.kernel)
    return Route(entry, target_of(capability), selection)


@dataclass(frozen=True)
class Table:
    """The whole table, as data (``rows``) that prints as aligned columns."""

    rows: tuple[Entry, ...]

    def __str__(self) -> str:
        cells = [("op", "variant", "backend", "kernel", "capabilities", "compiled for")]
        for entry in self.rows:
            named = (entry.op, entry.variant, entry.backend, entry.kernel)
            targets = ", ".join(entry.targets) or "-"
            cells.append((*named, entry.capability_text(), targets))
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )


def dispatch_table() -> Table:
    """The table that every call is dispatched by, in the order in which it is walked."""
    return Table(TABLE)


def explain(
    op: str = "gemm",
    *,
    m: int,
    k: int,
    n: int | None = None,
    variant: str = "per_token",
    capability: Capability | None = None,
    gpu: str | None = None,
    device: torch.device | str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    activation: str | None = None,
    fast_accum: bool = False,
    backend: str | None = None,
) -> Explanation:
    """Which entry a call takes, and why each earlier one was refused; nothing is run or compiled.

    Args:
        op: one of the table's.
        m, n, k: sizes; a producer has no n, and its k is that of what it writes.
        variant: ``per_token`` or ``mxfp8``.
        capability: of a GPU that need not be here, e.g. ``(12, 0)``; by default that of ``gpu`` or
            ``device``.
        gpu: one that need not be here, for the predicted times, e.g. ``RTX 5090``.
        device: by default the current CUDA device if there is one, else the CPU.
        out_dtype, bias, residual, activation, fast_accum: as in ``gemm``; bias and residual by
            dtype. For a producer of contiguous bf16 rows, residual says that there is one.
        backend: as in ``use``; by default the current one.

    Raises:
        TypeError, ValueError: an unknown op, variant, GPU or backend; or what ``gemm`` would
            refuse.
    """
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, must be one of {', '.join(OPS)}")
    variants = tuple(dict.fromkeys(entry.variant for entry in TABLE if entry.op == op))
    if variant not in variants:
        raise ValueError(f"variant: got {variant!r}, must be one of {', '.join(variants)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    problem: Problem
    if op in row_problem.OPS:
        if m < 0 or k <= 0 or n is not None:
            got = f"{m}, {k}" if n is None else f"{m}, {k} and n {n}"
            raise ValueError(f"m, k: got {got}, must be sizes (m may be 0), without n")
        problem = row_view.without_data(op, m, k, variant, residual is not None)
    elif op in block_problem.OPS:
        problem = block_problem.without_data(op, m, n, k, device)
    else:
        if n is None or m < 0 or n <= 0 or k <= 0:
            raise ValueError(f"m, n, k: got {m}, {n}, {k}, must be sizes (m may be 0)")
        operands = gemm_problem.without_data(m, n, k, variant, bias, residual)
        gated = op == "gemm_gated"
        problem = check_gemm(operands, activation, out_dtype, fast_accum, gated=gated)
    problem = replace(problem, device=device)
    settings = current()
    if backend is not None:
        settings = settings._replace(backend=check_backend(backend))
    if capability is not None:
        check_capability(capability)
    if gpu is None:
        return walk(problem, capability or capability_of_device(device), settings)
    of_gpu = gpus.named(gpu)
    if capability not in (None, of_gpu.capability):
        raise ValueError(
            f"capability: got {capability}, must be {of_gpu.capability}, the {of_gpu.name}'s"
        )
    return walk(problem, of_gpu.capability, settings, of_gpu)
