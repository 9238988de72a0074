"""The GEMMs of a sweep: ours and the peers, on the cases of the correctness tests.

One case is made per weight, with the most tokens of the sweep; smaller ones are its first rows. The
rotated copies of a weight are shared by all that multiply the same codes. ``exact`` is float64 of
sampled rows: one of every few, first and last among them, and all their columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import cute_fp8
from cute_fp8.evidence.sweep import impl_of, pinned, route_of
from cute_fp8.gemms.case import GemmCase, is_mx, quantized_case, sample, take
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.scales import to_blocked
from cute_fp8.timing import Contender, copies_of, rotated
from perf import quack_peer
from perf.operands import Call, Operands
from perf.peers import mxfp8, rowwise, tensorwise
from perf.shapes import Shape

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
EPILOGUES = ("none", "bias", "residual", *ACTIVATIONS)


def check_epilogue(name: str) -> str:
    """``name``, parts joined by ``+``.

    Raises:
        ValueError: an unknown part, or two activations.
    """
    parts = name.split("+")
    activations = sum(part in ACTIVATIONS for part in parts)
    if (
        any(part not in EPILOGUES for part in parts)
        or activations > 1
        or len({*parts}) < len(parts)
    ):
        wanted = f"one of {', '.join(EPILOGUES)}, or some joined by +, one activation at most"
        raise ValueError(f"epilogue: got {name!r}, must be {wanted}")
    return name


def make_case(variant: str, m: int, n: int, k: int, epilogue: str, device: str) -> GemmCase:
    """The case of the correctness tests, with scales as ``quantize_*`` makes them."""
    parts = epilogue.split("+")
    bf16 = torch.bfloat16
    return quantized_case(
        variant,
        m,
        n,
        k,
        device=device,
        bias=bf16 if "bias" in parts else None,
        residual=bf16 if "residual" in parts else None,
        activation=next((part for part in parts if part in ACTIVATIONS), None),
    )


@dataclass(frozen=True)
class Wanted:
    """Which implementations to set up.

    Attributes:
        backends: ours, by backend; see ``cute_fp8.use``.
        fast: also ours without promotion, where that is another kernel.
        impls: names to keep; None for all.
    """

    backends: Sequence[str]
    fast: bool = False
    impls: frozenset[str] | None = None

    def has(self, impl: str) -> bool:
        """Whether an implementation is to run."""
        return self.impls is None or impl in self.impls


class Weight:
    """One weight, its copies, and the tokens for it."""

    def __init__(
        self, variant: str, epilogue: str, shape: Shape, device: str, size: int | None = None
    ):
        """``shape``: with the most tokens; ``size``: bytes to rotate, if not the usual."""
        m, n, k = shape
        self.variant, self.epilogue, self.device = variant, epilogue, device
        self.case = make_case(variant, m, n, k, epilogue, device)
        case = self.case
        copies = self.copies = copies_of(case.wq, size)
        self.codes = rotated(case.wq, copies)
        self.scales = rotated(case.sw, copies)
        if variant == "mxfp8":
            self.scales = [to_blocked(scale) for scale in self.scales]
        # One scale each for tensor-wise calls: powers of two, so that bf16 holds code x scale.
        self.one_x, self.one_w = (_one(scale) for scale in (case.sx, case.sw))
        w16 = case.wq.to(torch.bfloat16) * self._factor(case.sw, self.one_w, k)
        self.copies16 = copies_of(w16, size)
        self.w16 = rotated(w16, self.copies16)

    def _factor(self, scale: Tensor, one: Tensor, k: int) -> Tensor:
        """What makes values of codes in bf16, exactly."""
        if not is_mx(scale):
            return one.to(torch.bfloat16)
        return scale.to(torch.bfloat16).repeat_interleave(MX_BLOCK, dim=1)

    def contenders(self, m: int, wanted: Wanted) -> Iterator[Contender]:
        """Ours and the peers for the first ``m`` tokens."""
        case = take(self.case, slice(0, m))
        shape = (m, case.n, case.k)
        rows = sample(m, self.device)
        sampled = case if rows is None else take(case, rows)
        exact = sampled.exact()[0]
        if self.variant == "per_token":
            case16 = replace(sampled, sx=self.one_x, sw=self.one_w)
            exact16 = case16.exact()[0]
        else:
            exact16 = exact
        make = partial(Contender, rows=rows, m=m)
        operands = self._operands(case)
        for backend in wanted.backends:
            impl = impl_of(backend)
            modes = {impl: False} | ({"cute_fp8_fast": True} if wanted.fast else {})
            for name, fast in modes.items():
                if wanted.has(name) and (not fast or backend == "auto"):
                    call = pinned(backend, _ours(operands, fast))
                    route = route_of((backend, self.variant), shape, self.device, fast)
                    yield make(name, call, self.copies, exact, route)
        if wanted.has("torch_bf16"):
            x16 = case.xq.to(torch.bfloat16) * self._factor(case.sx, self.one_x, case.k)
            bf16 = _finish(operands, lambda i, bias: F.linear(x16, self.w16[i], bias))
            yield make("torch_bf16", bf16, self.copies16, exact16, operand_bytes=2)
        for impl, (peer, tensor_scales) in self._peers(operands).items():
            if wanted.has(impl):
                truth = exact16 if tensor_scales else exact
                yield make(impl, _finish(operands, peer), self.copies, truth)

    def our_call(self, m: int, fast: bool) -> Callable[[int], Tensor]:
        """Our call of the first ``m`` tokens as users write it, whatever backend is in use."""
        return _ours(self._operands(take(self.case, slice(0, m))), fast)

    def kernel_scale(self, sx: Tensor) -> Tensor:
        """The tokens' scales in the order that kernels read."""
        return to_blocked(sx) if is_mx(sx) else sx

    def _operands(self, case: GemmCase) -> Operands:
        copies = max(self.copies, self.copies16)
        residuals: list[Tensor | None] = [None] * copies
        if case.residual is not None:
            residuals = [case.residual.roll(i, 1) for i in range(copies)]
        biases: list[Tensor | None] = [None] * copies
        if case.bias is not None:
            biases = list(rotated(case.bias, copies))
        return Operands(
            case.xq, self.kernel_scale(case.sx), self.codes, self.scales, biases, residuals,
            case.activation, self.one_x, self.one_w,
        )  # fmt: skip

    def _peers(self, operands: Operands) -> dict[str, tuple[Call, bool]]:
        """By name: the call, and whether its scales are one per tensor."""
        if self.variant == "mxfp8":
            return {"torch_mxfp8": (mxfp8(operands), False)}
        peers = {}
        for suffix, fast in (("", False), ("_fast", True)):
            peers[f"torch_rowwise{suffix}"] = (rowwise(operands, fast), False)
            peers[f"torch_tensorwise{suffix}"] = (tensorwise(operands, fast), True)
        if quack_peer.installed():
            peers["quack"] = (quack_peer.quack(operands), True)
        return peers


def _one(scale: Tensor) -> Tensor:
    """A power of two of about the scales' size, as one element."""
    return torch.exp2(scale.float().log2().mean().round())


def _ours(o: Operands, fast: bool) -> Callable[[int], Tensor]:
    def call(i: int) -> Tensor:
        y = cute_fp8.gemm(
            o.xq,
            o.sx,
            o.codes[i],
            o.scales[i],
            o.biases[i],
            residual=o.residuals[i],
            activation=o.activation,
            fast_accum=fast,
        )
        assert isinstance(y, Tensor)
        return y

    return call


def _finish(operands: Operands, call: Call) -> Callable[[int], Tensor]:
    """A peer's GEMM, with the bias in it, and the rest of the epilogue by torch."""
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
    }
    activation = activations.get(operands.activation or "")

    def finished(i: int) -> Tensor:
        y = call(i, operands.biases[i])
        if activation is not None:
            y = activation(y)
        residual = operands.residuals[i]
        return y if residual is None else y + residual

    return finished


def groups(shapes: Sequence[Shape]) -> dict[tuple[int, int], list[int]]:
    """The token counts of each weight ``(N, K)``, in order."""
    found: dict[tuple[int, int], list[int]] = {}
    for m, n, k in shapes:
        found.setdefault((n, k), []).append(m)
    return found
