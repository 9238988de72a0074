"""Which kernel configuration a problem gets.

What ``use(config=...)`` pins; else what autotuning found fastest on this very GPU; else the
configuration that the performance model (``model.py``) predicts to be fastest. Another M, another
GPU or a tuning run can bring another configuration and so another order of additions: results are
not batch-invariant unless ``config`` is pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cute_fp8.dtypes import dtype_name
from cute_fp8.gemms import winners
from cute_fp8.gemms.choice import Choice, Pick, spills
from cute_fp8.gemms.model import Prediction, TileCosts
from cute_fp8.gemms.model_sm90 import predict_hopper
from cute_fp8.gemms.problem import GemmProblem
from cute_fp8.gpus import Gpu
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig
from cute_fp8.kernels.config_sm90 import HopperConfig, HopperTile
from cute_fp8.kernels.tiles import TILES
from cute_fp8.kernels.tiles_sm90 import TILES_SM90

#: Split counts that are considered, where tiles alone leave SMs idle.
SPLITS = (2, 3, 4, 6, 8, 12, 16)
#: k-tiles that a split has at least: fewer do not fill the ring once.
SPLIT_K_TILES = 4
#: What splitting must be predicted to gain at least: its workspace is taken from whatever else runs
#: on the GPU, which the model does not see.
SPLIT_MARGIN = 0.02
#: How many that come after the chosen one ``explain`` shows.
RUNNERS_UP = 3

_WHY = {
    "predicted": "first by the performance model",
    "tuned": "fastest when autotuned",
    "pinned": "pinned",
}
_COLUMNS = ("config", "us", "limit", "compute", "of it split", "L2", "DRAM", "units", "per SM")


@dataclass(frozen=True)
class Ranked:
    """A configuration that can serve a problem, and its predicted time."""

    pick: Pick
    prediction: Prediction

    def cells(self) -> tuple[str, ...]:
        """A line of ``explain``'s table."""
        p = self.prediction
        times = (f"{us:.1f}" for us in (p.compute_us, p.split_us, p.l2_us, p.dram_us))
        return (self.pick.name, f"{p.us:.1f}", p.limit, *times, str(p.units), str(p.rounds))


@dataclass(frozen=True)
class Selection:
    """What a problem gets on a GPU, why, and what it might have got.

    Attributes:
        reason: ``predicted``, ``tuned`` or ``pinned``.
        chosen: the pick, with its predicted time.
        ranking: all that can serve it, the fastest predicted first; empty where one is pinned.
    """

    gpu: Gpu
    reason: str
    chosen: Ranked
    ranking: tuple[Ranked, ...] = ()

    def lines(self) -> list[str]:
        """The choice and the runners-up, as aligned columns, for ``explain``."""
        others = [r for r in self.ranking if r.pick != self.chosen.pick][:RUNNERS_UP]
        rows = [_COLUMNS, *(ranked.cells() for ranked in (self.chosen, *others))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        times = f"predicted times (a split ranks as {SPLIT_MARGIN:.0%} slower)"
        head = f"{_WHY[self.reason]}; {times}, {self.gpu.name}:"
        return [head, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]


def select_config(
    problem: GemmProblem, gpu: Gpu, choice: Choice | None = None, kernel: str = GemmConfig.module
) -> Selection:
    """The configuration of a kernel for a problem on a GPU.

    Args:
        choice: a pinned one.
        kernel: its module.

    Raises:
        ValueError: a pinned one that cannot serve the problem, with the reason.
    """
    if choice is not None:
        return Selection(gpu, "pinned", _pinned(problem, gpu, choice, kernel))
    ranking = tuple(rank(problem, gpu, kernel))
    tuned = winners.winner(gpu.name, name_of(problem))
    if tuned is not None:
        try:
            return Selection(gpu, "tuned", _pinned(problem, gpu, tuned, kernel), ranking)
        except ValueError:
            pass  # of a space that has changed since
    return Selection(gpu, "predicted", ranking[0], ranking)


def rank(problem: GemmProblem, gpu: Gpu, kernel: str = GemmConfig.module) -> list[Ranked]:
    """Every configuration that can serve a problem, the one predicted to be fastest first.

    A split counts as slower than it is by :data:`SPLIT_MARGIN`; of equally fast ones, the first in
    ``TILES`` comes first.
    """

    def cost(ranked: Ranked) -> float:
        return ranked.prediction.us * (1 + SPLIT_MARGIN * (ranked.pick.splits > 1))

    hopper = kernel == HopperConfig.module
    found = _hopper_candidates(problem, gpu) if hopper else _candidates(problem, gpu)
    return sorted(found, key=cost)


def name_of(problem: GemmProblem) -> str:
    """What tells problems apart that may be served best by different configurations."""
    sizes = f"{problem.m}x{problem.n}x{problem.k}"
    fast = "-fast" * problem.fast_accum
    return f"{problem.op}_{problem.variant}-{sizes}-{epilogue_of(problem).name}{fast}"


def epilogue_of(problem: GemmProblem) -> EpilogueConfig:
    """The epilogue that a problem asks of a kernel."""
    return EpilogueConfig(
        out=dtype_name(problem.out_dtype),
        bias=dtype_name(problem.bias),
        residual=dtype_name(problem.residual),
        activation=problem.activation,
        gated=problem.gated,
    )


def _candidates(problem: GemmProblem, gpu: Gpu) -> Iterator[Ranked]:
    epilogue, m, n, k = epilogue_of(problem), problem.m, problem.n, problem.k
    for tile in TILES[problem.variant]:
        try:
            pick = Choice(tile).pick(epilogue, problem.variant)
        except ValueError:
            continue  # a tile that this epilogue cannot be added to
        assert isinstance(pick.config, GemmConfig)
        costs = TileCosts(pick.config, gpu)
        whole = costs.predict(m, n, k)
        yield Ranked(pick, whole)
        for splits in SPLITS:
            # Past two units for each SM, or with a few k-tiles each, splitting cannot pay.
            if whole.units * splits > 2 * gpu.sms or k < splits * SPLIT_K_TILES * tile.k:
                break
            try:
                split = Choice(tile, splits).pick(epilogue, problem.variant)
            except ValueError:
                break
            yield Ranked(split, costs.predict(m, n, k, splits))


def _hopper_candidates(problem: GemmProblem, gpu: Gpu) -> Iterator[Ranked]:
    epilogue, m, n, k = epilogue_of(problem), problem.m, problem.n, problem.k
    for tile in TILES_SM90:
        # Of the tiles for few tokens, the narrowest that holds all of them.
        if tile.swap_ab and tile.m > 8 and not tile.m // 2 < m <= tile.m:
            continue
        # Of the others, none that would lie mostly past the last token.
        if not tile.swap_ab and m <= tile.m // 2:
            continue
        if spills(tile, epilogue):
            continue
        try:
            pick = Choice(tile, pdl=True).pick(epilogue, problem.variant, problem.fast_accum)
        except ValueError:
            continue  # a tile whose sums this mode has no registers for
        assert isinstance(pick.config, HopperConfig)
        yield Ranked(pick, predict_hopper(pick.config, gpu, m, n, k))


def _pinned(problem: GemmProblem, gpu: Gpu, choice: Choice, kernel: str) -> Ranked:
    if choice.kernel != kernel:
        raise ValueError(
            f"config {choice.name}: got a tile of {choice.kernel}, must be one of {kernel}"
        )
    if isinstance(choice.tile, HopperTile):
        pick = choice.pick(epilogue_of(problem), problem.variant, problem.fast_accum)
        assert isinstance(pick.config, HopperConfig)
        sizes = problem.m, problem.n, problem.k
        return Ranked(pick, predict_hopper(pick.config, gpu, *sizes))
    if choice.dynamic and gpu.capability[0] != 12:
        raise ValueError(
            f"config {choice.name}: got a GPU of compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]}, must be 12.x (cluster launch control)"
        )
    pick = choice.pick(epilogue_of(problem), problem.variant)
    assert isinstance(pick.config, GemmConfig)
    most = pick.config.max_splits(problem.m, problem.n, problem.k)
    if choice.splits > most:
        raise ValueError(
            f"config {choice.name}: got {choice.splits} splits, must be at most {most} for "
            f"M, N, K = {problem.m}, {problem.n}, {problem.k}"
        )
    prediction = TileCosts(pick.config, gpu).predict(problem.m, problem.n, problem.k, choice.splits)
    return Ranked(pick, prediction)
