"""The reference quantisers against exact rational arithmetic, independent of torch's casts.

The oracles (``exact_*``, ``e4m3_*``) live in :mod:`cute_fp8.testing`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_fp8 import numerics
from cute_fp8.numerics import (
    FP8_MAX,
    MX_BLOCK,
    dequantize_fp8,
    dequantize_mxfp8,
    encode_fp8,
    quantize_fp8,
    quantize_fp8_activations,
    quantize_mxfp8,
)
from cute_fp8.scales import to_blocked
from cute_fp8.testing import (
    E4M3_MAGNITUDES,
    e4m3_code,
    exact_mx_block,
    exact_row,
    inputs,
    round_fp32,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
EXPONENT_BITS = {torch.bfloat16: 8, torch.float16: 5, torch.float32: 8}
INF, NAN = float("inf"), float("nan")


def raw(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def from_bits(bits: list[int], dtype: torch.dtype) -> Tensor:
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    return torch.tensor(bits, dtype=torch.int64).to(integer).view(dtype)


@st.composite
def rows(draw: st.DrawFn, dtype: torch.dtype, length: int) -> Tensor:
    """Finite values of any sign and mantissa within 20 binades, anywhere in the dtype's range."""
    mantissa_bits, exponent_bits = MANTISSA_BITS[dtype], EXPONENT_BITS[dtype]
    top = draw(st.integers(0, 2**exponent_bits - 2))
    mantissa = st.integers(0, 2**mantissa_bits - 1)
    element = st.tuples(st.integers(0, 1), st.integers(0, 20), mantissa)
    bits = [
        sign << (mantissa_bits + exponent_bits) | max(0, top - below) << mantissa_bits | fraction
        for sign, below, fraction in draw(st.lists(element, min_size=length, max_size=length))
    ]
    return from_bits(bits, dtype).unsqueeze(0)


# --- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_per_row_matches_exact_arithmetic(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(rows(dtype, 16))
    scale, codes = exact_row(x[0].double().tolist())
    for function in (quantize_fp8, quantize_fp8_activations):
        got, got_scale = function(x)
        assert Fraction(got_scale.item()) == scale
        assert raw(got)[0].tolist() == codes


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_mxfp8_matches_exact_arithmetic(dtype: torch.dtype, data: st.DataObject) -> None:
    x = data.draw(rows(dtype, MX_BLOCK))
    byte, codes = exact_mx_block(x[0].double().tolist())
    got, scale = quantize_mxfp8(x)
    assert raw(scale).tolist() == [[byte]]
    assert raw(got)[0].tolist() == codes


def test_every_bf16_value_at_unit_scale() -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= FP8_MAX]
    values = torch.cat([values, values.new_zeros(-len(values) % 15)]).view(-1, 15)
    x = torch.cat([torch.full((len(values), 1), FP8_MAX).to(values.dtype), values], dim=1)
    codes, scale = quantize_fp8_activations(x)
    assert torch.equal(scale, torch.ones(len(x)))
    magnitude = [e4m3_code(Fraction(abs(v))) for v in x.double().flatten().tolist()]
    expected = torch.tensor(magnitude, dtype=torch.uint8) | x.flatten().signbit() * 0x80
    assert torch.equal(raw(codes).flatten(), expected.to(torch.uint8))


def boundary_amaxes() -> Tensor:
    """2**k and 448 * 2**k with both neighbours over fp32's whole range, denormals included."""
    bits = {1, 2, 3, 0x7FFFFF, 0x7F7FFFFF}
    for base in [1 << k for k in range(23)] + [7 << k for k in range(21)]:
        bits |= {base - 1, base, base + 1}
    for exponent in range(1, 255):
        for mantissa in (0, 0x600000):
            bits |= {(exponent << 23 | mantissa) + step for step in (-1, 0, 1)}
    return from_bits(sorted(bits - {0}), torch.float32)


def test_mx_exponent_at_every_boundary() -> None:
    amax = boundary_amaxes()
    x = torch.zeros(len(amax), MX_BLOCK)
    x[:, 5] = -amax
    codes, scale = quantize_mxfp8(x)
    oracle = [exact_mx_block(row) for row in x[:, 5:6].double().tolist()]
    assert raw(scale).flatten().tolist() == [byte for byte, _ in oracle]
    assert raw(codes)[:, 5].tolist() == [code[0] for _, code in oracle]
    assert raw(scale).min() == 0
    assert raw(scale).max() == 247


def test_row_scale_at_every_boundary() -> None:
    amax = boundary_amaxes()
    x = torch.zeros(len(amax), 16)
    x[:, 3], x[:, 4] = amax, -amax / 3
    codes, scale = quantize_fp8_activations(x)
    oracle = [exact_row(row) for row in x[:, 3:5].double().tolist()]
    assert [Fraction(s) for s in scale.double().tolist()] == [s for s, _ in oracle]
    assert raw(codes)[:, 3:5].tolist() == [code for _, code in oracle]


# --- the contract's special rows ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [quantize_fp8, quantize_fp8_activations])
def test_zero_rows(function: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0] * 16, [-0.0] * 16, [1.0, -0.0, -(2.0**-20)] + [0.0] * 13]).to(dtype)
    codes, scale = function(x)
    assert scale[:2].tolist() == [1.0, 1.0]
    assert not raw(codes)[:2].any()
    # Elsewhere a negative zero and a negative underflow keep their sign.
    assert raw(codes)[2, :4].tolist() == [0x7E, 0x80, 0x80, 0x00]


def test_zero_blocks() -> None:
    x = torch.cat([torch.zeros(1, 32), -torch.zeros(1, 32), torch.ones(1, 32)], dim=1)
    x[0, 65:67] = torch.tensor([-0.0, -1e-30])
    codes, scale = quantize_mxfp8(x)
    assert raw(scale).tolist() == [[0x00, 0x00, 119]]  # 1 <= 448 * 2**-8
    assert not raw(codes)[0, :64].any()
    assert raw(codes)[0, 64:68].tolist() == [0x78, 0x80, 0x80, 0x78]
    assert not dequantize_mxfp8(codes, scale)[0, :64].any()


def test_denormal_rows_are_not_flushed() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 2.0**-127, -(2.0**-135), 2.0**-137
    codes, scale = quantize_fp8_activations(x)
    assert scale.item() == 2.0**-126
    # 2**-1, -2**-9 (the smallest code) and 2**-11 (below half of it).
    assert raw(codes)[0, :4].tolist() == [0x30, 0x81, 0x00, 0x00]
    codes, scale = quantize_mxfp8(x)
    assert raw(scale).item() == 0
    assert raw(codes)[0, :4].tolist() == [0x38, 0x82, 0x00, 0x00]  # 2**-10 ties to even
    assert dequantize_mxfp8(codes, scale, torch.float32)[0, :2].tolist() == x[0, :2].tolist()


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_stays_in_its_row(bad: float, dtype: torch.dtype) -> None:
    clean = inputs("gaussian", 5, 64, seed=0, dtype=dtype)
    dirty = clean.clone()
    dirty[3, 40] = bad
    codes, scale = quantize_fp8_activations(dirty)
    clean_codes, clean_scale = quantize_fp8_activations(clean)
    assert scale.view(torch.int32)[3] == 0x7FC00000
    assert (raw(codes)[3] == 0x7F).all()
    others = torch.tensor([0, 1, 2, 4])
    assert torch.equal(raw(codes)[others], raw(clean_codes)[others])
    assert torch.equal(scale[others], clean_scale[others])

    codes, mx_scale = quantize_mxfp8(dirty)
    clean_codes, clean_mx = quantize_mxfp8(clean)
    expected_codes, expected_scale = raw(clean_codes).clone(), raw(clean_mx).clone()
    expected_codes[3, 32:], expected_scale[3, 1] = 0x7F, 0xFF
    assert torch.equal(raw(codes), expected_codes)
    assert torch.equal(raw(mx_scale), expected_scale)
    values = dequantize_mxfp8(codes, mx_scale)
    assert values[3, 32:].isnan().all()
    assert values.isnan().sum() == 32

    with pytest.raises(ValueError, match="output channel 3, must be finite"):
        quantize_fp8(dirty)


def test_saturation() -> None:
    values = [447.9, 448.0, 463.9, 464.0, 465.0, 1e30, INF]
    x = torch.tensor(values + [-v for v in values])
    assert raw(encode_fp8(x, torch.ones(1))).tolist() == [0x7E] * 7 + [0xFE] * 7
    assert encode_fp8(torch.tensor([NAN]), torch.ones(1)).float().isnan()
    # From the row's own maximum, 465 is not saturated but scaled.
    row = torch.zeros(1, 16)
    row[0, :3] = torch.tensor([465.0, 447.9, -464.0])
    codes, scale = quantize_fp8_activations(row)
    assert Fraction(scale.item()) == round_fp32(Fraction(465, 448))
    assert raw(codes)[0, :3].tolist() == [0x7E, 0x7D, 0xFE]


@pytest.mark.parametrize(
    ("dtype", "amax", "tie", "quotient", "even"),
    [
        (torch.bfloat16, "0x1.3p+0", "0x1.c8p-2", 168.0, 0x72),
        (torch.float16, "0x1.a4p-1", "0x1.77p-2", 200.0, 0x74),
        (torch.float32, "0x1.4225e2p-1", "0x1.36a488p-2", 216.0, 0x76),
        (torch.float32, "0x1.b27adap-1", "0x1.e10802p-2", 248.0, 0x78),
    ],
)
def test_ties_are_decided_by_division(
    dtype: torch.dtype, amax: str, tie: str, quotient: float, even: int
) -> None:
    """Values whose IEEE quotient is exactly half-way, where a reciprocal takes the other side."""
    row = torch.zeros(1, 16, dtype=torch.float64)
    row[0, 0], row[0, 1] = float.fromhex(amax), float.fromhex(tie)
    x = row.to(dtype)
    assert torch.equal(x.double(), row)
    codes, scale = quantize_fp8_activations(x)
    assert (x.float()[0, 1] / scale).item() == quotient
    by_reciprocal = x.float()[0, 1] * (1 / scale)
    assert e4m3_code(Fraction(by_reciprocal.item())) != even
    assert raw(codes)[0, 1] == even


# --- shapes, layouts, dequantisation ------------------------------------------------------------


def test_no_rows() -> None:
    x = torch.zeros(0, 2, 64, dtype=torch.bfloat16)
    codes, scale = quantize_fp8_activations(x)
    assert codes.shape == (0, 2, 64)
    assert scale.shape == (0,)
    assert dequantize_fp8(codes, scale).shape == (0, 2, 64)
    for blocked, shape in ((False, (0, 2)), (True, (0,))):
        codes, scale = quantize_mxfp8(x, blocked=blocked)
        assert codes.shape == (0, 2, 64)
        assert scale.shape == shape
        assert dequantize_mxfp8(codes, scale).shape == (0, 2, 64)
    assert quantize_fp8(x[:, 0])[0].shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_leading_dimensions_do_not_matter(dtype: torch.dtype) -> None:
    x = inputs("heavy_tailed", 12, 64, seed=1, dtype=dtype)
    padded = torch.full((12, 96), NAN, dtype=dtype)
    padded[:, 8:72] = x
    before = x.clone()
    for other in (x.t().contiguous().t(), padded[:, 8:72], x.view(3, 4, 64)):
        for function in (quantize_fp8_activations, quantize_mxfp8):
            codes, scale = function(other)
            want, want_scale = function(x)
            assert codes.shape == other.shape
            assert codes.is_contiguous()
            assert torch.equal(raw(codes).view(12, 64), raw(want))
            assert torch.equal(scale.view(torch.uint8), want_scale.view(torch.uint8))
    codes, scale = quantize_fp8(padded[:, 8:72])
    want, want_scale = quantize_fp8_activations(x)
    assert torch.equal(raw(codes), raw(want))
    assert torch.equal(scale, want_scale)
    assert torch.equal(x, before)


def test_weights_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    w = inputs("gaussian", 11, 64, seed=2)
    want, want_scale = quantize_fp8(w)
    monkeypatch.setattr(numerics, "_CHUNK", 200)  # three rows at a time
    codes, scale = quantize_fp8(w)
    assert torch.equal(raw(codes), raw(want))
    assert torch.equal(scale, want_scale)


def test_blocked_scales() -> None:
    x = inputs("heavy_tailed", 130, 160, seed=3)
    codes, scale = quantize_mxfp8(x)
    blocked_codes, blocked = quantize_mxfp8(x, blocked=True)
    assert blocked.dtype == torch.float8_e8m0fnu
    assert torch.equal(raw(codes), raw(blocked_codes))
    assert torch.equal(raw(blocked), raw(to_blocked(scale)))
    assert torch.equal(dequantize_mxfp8(codes, blocked), dequantize_mxfp8(codes, scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise_every_code_and_every_scale_byte(dtype: torch.dtype) -> None:
    magnitude = torch.tensor([float(m) for m in E4M3_MAGNITUDES] + [NAN], dtype=torch.float64)
    table = torch.cat([magnitude, -magnitude])
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).repeat(256, 1)
    byte = torch.arange(256)
    factor = torch.where(byte == 255, NAN, 2.0 ** (byte.double() - 127)).unsqueeze(1)
    want = (factor * table).to(torch.float32).to(dtype)  # fp32 holds every product, or overflows
    scale = byte.to(torch.uint8).view(torch.float8_e8m0fnu).unsqueeze(1).repeat(1, 8)
    got = dequantize_mxfp8(codes, scale, dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))

    per_row = torch.rand(256, generator=torch.Generator().manual_seed(4)) * 3
    want = (table * per_row.double().unsqueeze(1)).to(torch.float32).to(dtype)
    for shaped in (per_row, per_row.unsqueeze(1), per_row.unsqueeze(0)):
        got = dequantize_fp8(codes, shaped, dtype)
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    one = dequantize_fp8(codes, torch.tensor(0.5), dtype)
    assert torch.equal(one[9].nan_to_num(7.0), (table / 2).to(dtype).nan_to_num(7.0))


def test_dequantise_defaults_and_leading_dimensions() -> None:
    x = inputs("gaussian", 6, 32, seed=5).view(2, 3, 32)
    codes, scale = quantize_fp8_activations(x)
    for shaped in (scale, scale.view(2, 3), scale.view(2, 3, 1)):
        y = dequantize_fp8(codes, shaped)
        assert y.dtype == torch.bfloat16
        assert y.shape == x.shape
        assert (y - x).abs().max() <= x.abs().max() / 16
    assert dequantize_mxfp8(*quantize_mxfp8(x)).shape == x.shape


# --- refusals and host reads --------------------------------------------------------------------


def test_run_time_quantisers_read_no_values() -> None:
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")  # a read would raise
    codes, scale = quantize_fp8_activations(x)
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, (4, 64))
    assert (scale.dtype, scale.shape) == (torch.float32, (4,))
    codes, scale = quantize_mxfp8(x, blocked=True)
    assert (scale.dtype, scale.shape) == (torch.float8_e8m0fnu, (512,))
    assert dequantize_mxfp8(codes, scale).dtype == torch.bfloat16


def test_graph_capture_is_refused_at_build_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 32)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with pytest.raises(RuntimeError, match="quantize_fp8: called during CUDA graph capture"):
        quantize_fp8(x)
    quantize_fp8_activations(x)
    quantize_mxfp8(x)
    capturing[0] = False
    quantize_fp8(x)


def test_grad_is_refused_except_for_parameters() -> None:
    x = torch.ones(2, 32, requires_grad=True)
    for function in (quantize_fp8_activations, quantize_mxfp8):
        with pytest.raises(RuntimeError, match=r"^x: .*torch\.no_grad"):
            function(x)
        with torch.no_grad():
            function(x)
        assert not function(torch.nn.Parameter(torch.ones(2, 32)))[1].requires_grad
    quantize_fp8(x * 2)


CODES = torch.zeros(4, 64, dtype=torch.float8_e4m3fn)
E8M0 = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: quantize_fp8(torch.zeros(4, 64).double()), TypeError, "w: got torch.float64"),
        (lambda: quantize_fp8(torch.zeros(64)), ValueError, r"w: got shape \(64,\), must be 2-D"),
        (lambda: quantize_fp8(torch.zeros(4, 24)), ValueError, "w: got K = 24.* multiple of 16"),
        (lambda: quantize_fp8_activations(CODES), TypeError, "x: got torch.float8_e4m3fn"),
        (lambda: quantize_fp8_activations(torch.zeros(())), ValueError, "x: .*without dimensions"),
        (lambda: quantize_fp8_activations(torch.zeros(4, 0)), ValueError, "x: got K = 0"),
        (lambda: quantize_mxfp8(torch.zeros(4, 48)), ValueError, "x: got K = 48.* multiple of 32"),
        (lambda: quantize_mxfp8(torch.zeros(4, 64).long()), TypeError, "x: got torch.int64"),
        (lambda: dequantize_fp8(raw(CODES), torch.ones(4)), TypeError, "q: got torch.uint8"),
        (lambda: dequantize_fp8(CODES, torch.ones(4).half()), TypeError, "scale: got"),
        (lambda: dequantize_fp8(CODES, torch.ones(64)), ValueError, r"scale: .*must be \(4,\)"),
        (lambda: dequantize_fp8(CODES, torch.ones(2, 2)), ValueError, r"scale: got shape \(2, 2\)"),
        (lambda: dequantize_fp8(CODES, torch.ones(4), torch.int8), TypeError, "dtype: got"),
        (lambda: dequantize_fp8(CODES[0, 0], torch.ones(1)), ValueError, "q: .*without dimensions"),
        (lambda: dequantize_mxfp8(CODES, raw(E8M0)), TypeError, "scale: got torch.uint8"),
        (lambda: dequantize_mxfp8(CODES, E8M0.t()), ValueError, r"must be \(4, 2\) or"),
        (lambda: dequantize_mxfp8(CODES[:, :48], E8M0), ValueError, "q: got K = 48"),
    ],
)
def test_refusals(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert "must be" in str(caught.value)
