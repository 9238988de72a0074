"""What every call asks of a tensor, and what it makes of modes that are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import cute_fp8
from cute_fp8 import accuracy, api, arguments, numerics
from cute_fp8.gemms import ops

X = torch.randn(4, 32)


def operands() -> tuple[torch.Tensor, ...]:
    return (*cute_fp8.quantize_fp8_activations(X), *cute_fp8.quantize_fp8(torch.randn(16, 32)))


def test_a_default_device_keeps_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    expected = cute_fp8.gemm(*given)
    monkeypatch.setattr(api, "_call_op", lambda *a, **o: pytest.fail("took the long way"))
    with torch.device("meta"):  # as `torch.set_default_device`: a mode that is on
        assert torch.equal(cute_fp8.gemm(*given), expected)
        assert cute_fp8.gemm(*given).device == X.device
        assert cute_fp8.quantize_fp8_activations(X)[0].device == X.device


def test_any_other_mode_sees_the_op() -> None:
    class Names(TorchFunctionMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    given = operands()
    with torch.device("cpu"), Names() as names:
        cute_fp8.gemm(*given)
    assert any("cute_fp8" in name for name in names.seen) and ops


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: numerics.quantize_fp8([1.0]), "w"),
        (lambda: numerics.quantize_mxfp8(None), "x"),
        (lambda: numerics.dequantize_fp8("q", X), "q"),
        (lambda: cute_fp8.to_blocked(3), "scales"),
        (lambda: cute_fp8.from_blocked(None, 1, 1), "blocked"),
        (lambda: accuracy.near_lossless([1], X), "y"),
        (lambda: accuracy.near_lossless(X, 1), "ref"),
        (lambda: accuracy.smoothquant_factors(X, None), "x"),
        (lambda: accuracy.fp8_w8a8_error(None, X, X, X), "weight"),
        (lambda: cute_fp8.rmsnorm_quantize(X, None, 1e-5), "weight"),
        (lambda: cute_fp8.fp8_w8a8_linear(None, X, X), "x"),
    ],
)
def test_what_is_no_tensor_is_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: got \w+, must be a torch\.Tensor$"):
        call()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_forward_derivatives_are_refused() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(RuntimeError, match=r"^x: got a tensor with a tangent, must have none"):
            cute_fp8.quantize_fp8_activations(dual)
        cute_fp8.quantize_fp8_activations(X)
    with pytest.raises(RuntimeError, match=r"^x: got a tensor with a tangent"):
        torch.func.jvp(lambda t: cute_fp8.quantize_fp8_activations(t)[1], (X,), (X,))


def test_an_address_that_is_none() -> None:
    odd = torch.empty(33, dtype=torch.uint8)[1:]
    assert arguments.misaligned_by(odd) == odd.data_ptr() % arguments.ALIGNMENT
    assert arguments.misaligned_by(odd.to("meta")) == 0
