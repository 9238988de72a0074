"""A projection of few tokens in one launch: codes bit for bit, sums against float64, what is left
alone, graphs, streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import testing
from cute_fp8.decoder import lookup, problem, projection
from cute_fp8.decoder.case import ProjectionCall
from cute_fp8.decoder.projection import Projected
from cute_fp8.decoder.weights import Projection, project
from cute_fp8.testing import TIER_KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: Outputs and K: models', one block, tails of both, several passes, rows of odd numbers of warps.
SIZES = (
    (6144, 4096),
    (4096, 4096),
    (2560, 1024),
    (1024, 2048),
    (8, 16),
    (40, 144),
    (1000, 2064),
    (18952, 272),
    (520, 5120),
    (136, 8192),
)
SMALL = (136, 400)
GUARD = 64


def arch() -> str:
    return "sm_120" if torch.cuda.get_device_capability()[0] == 12 else "stand-in"


def case_of(
    m: int,
    n: int,
    k: int,
    *,
    norm: bool,
    kind: str = "gaussian",
    dtype: torch.dtype = torch.bfloat16,
    norm_dtype: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    seed: int = 0,
) -> ProjectionCall:
    generator = torch.Generator("cuda").manual_seed(seed + m + n + k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    x = testing.inputs(kind, m, k, seed=seed).to("cuda", dtype)
    w = project(normal(n, k) / k**0.5, None if bias is None else normal(n).to(bias), "per_token")
    weight = (1 + 0.1 * normal(k)).to(norm_dtype or dtype) if norm else None
    return ProjectionCall(x, weight, w, None if norm else normal(m, n).to(dtype))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def check(case: ProjectionCall) -> Projected:
    """Twice the same, and right."""
    made = case.run()
    assert case.errors(made, arch()) == []
    again = case.run()
    assert all(torch.equal(as_bytes(p), as_bytes(q)) for p, q in zip(made, again, strict=True))
    return made


@pytest.fixture(autouse=True)
def _every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, too, where more of them, and large weights, are launched in parts."""
    monkeypatch.setattr(problem, "faster_on_hopper", lambda m, n, k: True)
    monkeypatch.setattr(lookup, "_kernels", {})


@pytest.fixture(params=[True, False], ids=["norm", "residual"])
def norm(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_the_kernel_is_what_runs(launched: Callable[..., list[str]], norm: bool) -> None:
    found = cute_fp8.explain("projection", m=4, n=512, k=256)
    assert found.route is not None and found.route.entry.name == "cute:projection"
    case = case_of(4, *SMALL, norm=norm)
    case.run()
    assert len(launched(case.run)) == 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("m", [1, 3, 16])
def test_float64(sizes: tuple[int, int], m: int, norm: bool) -> None:
    check(case_of(m, *sizes, norm=norm))


@pytest.mark.parametrize("m", range(1, 17))
def test_every_number_of_tokens(m: int, norm: bool) -> None:
    check(case_of(m, *SMALL, norm=norm))


@pytest.mark.parametrize("kind", [*TIER_KINDS, "zeros", "denormals", "max_codes"])
def test_values_that_provoke_a_rule(kind: str, norm: bool) -> None:
    check(case_of(13, *SMALL, norm=norm, kind=kind))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_a_bias(dtype: torch.dtype, other: torch.dtype, norm: bool) -> None:
    check(case_of(5, *SMALL, norm=norm, dtype=dtype, norm_dtype=other, bias=other))


@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize("sizes", [(4096, 4096), SMALL], ids=str)
def test_integers_are_exact(m: int, sizes: tuple[int, int]) -> None:
    """Codes are the values where a row's largest is 448; of products of at most 2, few are not 0:
    sums are right to the last bit.
    """
    n, k = sizes
    generator = torch.Generator("cuda").manual_seed(m + k)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator, device="cuda").float()

    x, codes = integers(m, k), integers(n, k)
    x[:, 100:] = 0
    x[:, 0], codes[:, 0] = 448, 0
    w = Projection(codes.to(torch.float8_e4m3fn), torch.ones(n, device="cuda"))
    residual = integers(m, n).bfloat16()
    made = ProjectionCall(x.bfloat16(), None, w, residual).run()
    assert torch.equal(made.scales, torch.ones(m, device="cuda"))
    assert torch.equal(made.y.float(), x @ codes.t() + residual.float())


def test_nan_stays_in_its_row(norm: bool) -> None:
    case = case_of(16, 2560, 1024, norm=norm)
    good = case.run()
    x = case.rows.clone()
    x[3, 100], x[15, 7] = float("nan"), float("inf")
    made = check(case._replace(rows=x))
    rows = torch.tensor([3, 15], device="cuda")
    others = torch.tensor([i for i in range(16) if i not in (3, 15)], device="cuda")
    assert bool(made.y[rows].isnan().all()) and torch.equal(made.y[others], good.y[others])
    assert bool((as_bytes(made.codes)[rows] == 0x7F).all()) and bool(
        made.scales[rows].isnan().all()
    )
    assert torch.equal(case.run().y, good.y)


@pytest.mark.parametrize("m", [1, 5, 16])
def test_everything_is_written_and_nothing_else(
    m: int, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that were NaN, between guards that stay."""
    case = case_of(m, 1000, 2064, norm=norm)
    wanted = case.run()
    memory: list[tuple[Tensor, Tensor]] = []

    def empty(*args: Any, **options: Any) -> Tensor:
        shape, dtype = (
            args[0] if isinstance(args[0], tuple | torch.Size) else args,
            options["dtype"],
        )
        count = torch.Size(shape if isinstance(shape, tuple | torch.Size) else (shape,)).numel()
        whole = torch.full((count * dtype.itemsize + 2 * GUARD,), 0xFF, dtype=torch.uint8).cuda()
        inner = whole[GUARD : whole.numel() - GUARD].view(dtype).view(shape)
        memory.append((whole, inner))
        return inner

    with monkeypatch.context() as patch:
        patch.setattr(projection.torch, "empty", empty)
        made = case.run()
    assert len(memory) == 3
    for p, q in zip(made, wanted, strict=True):
        assert torch.equal(as_bytes(p), as_bytes(q))
    for whole, _ in memory:
        assert bool((whole[:GUARD] == 0xFF).all()) and bool((whole[-GUARD:] == 0xFF).all())


def test_a_graph_of_both() -> None:
    """What one launch writes the next reads, launched early."""
    first, second = (case_of(4, 1024, 1024, norm=norm) for norm in (True, False))
    static = first.rows.clone()

    def chain(x: Tensor) -> Tensor:
        for _ in range(3):
            y = first._replace(rows=x).run().y
            x = second._replace(rows=y, residual=x).run().y
        return x

    chain(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(static)
    for seed in range(3):
        static.copy_(case_of(4, 1024, 1024, norm=True, seed=seed).rows)
        for _ in range(20):
            graph.replay()
        assert torch.equal(y, chain(static))


def test_on_two_streams(norm: bool) -> None:
    cases = [case_of(16, 2560, 1024, norm=norm, seed=seed) for seed in range(2)]
    wanted = [case.run().y for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for case, stream, made in zip(cases, streams, found, strict=True):
            with torch.cuda.stream(stream):
                made.append(case.run().y)
    torch.cuda.synchronize()
    for y, made in zip(wanted, found, strict=True):
        assert all(torch.equal(one, y) for one in made)


def test_torch_compile(norm: bool) -> None:
    case = case_of(4, *SMALL, norm=norm)
    compiled = torch.compile(lambda x: tuple(case._replace(rows=x).run()), fullgraph=True)
    for p, q in zip(compiled(case.rows), case.run(), strict=True):
        assert torch.equal(as_bytes(p), as_bytes(q))


def test_what_goes_in_parts(launched: Callable[..., list[str]]) -> None:
    few = case_of(4, *SMALL, norm=True)
    single = few._replace(rows=few.rows.float())
    for case in (case_of(problem.MOST_PROJECTED + 1, *SMALL, norm=True), single):
        case.run()
        assert len(launched(case.run)) > 1
    with cute_fp8.use(backend="reference"):
        assert projection._kernel(*few[:2], as_bytes(few.w.codes), *few.w[1:], None) is None


def test_a_row_stride() -> None:
    case = case_of(5, *SMALL, norm=False)
    wide = torch.full((5, 2 * SMALL[1]), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, : SMALL[1]] = case.rows
    made = check(case._replace(rows=wide[:, : SMALL[1]]))
    assert torch.equal(made.y, case.run().y)
