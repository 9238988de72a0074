"""What can be chosen about a GEMM's kernel, and the names that people write it by.

A :class:`Choice` is what ``use(config=...)`` pins and what autotuning keeps: a tile and how it is
scheduled, for any epilogue. With a problem's epilogue and variant it becomes a :class:`Pick`, a
kernel to compile and the number of splits that it is launched with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cute_fp8.kernels.config import EpilogueConfig, GemmConfig, TileConfig
from cute_fp8.kernels.config_sm90 import HopperConfig, HopperTile
from cute_fp8.kernels.configs import AnyGemm

#: A tile of any kernel.
Tile = TileConfig | HopperTile

_HOPPER_TILE = re.compile(
    r"(\d+)x(\d+)x128_s(\d+)_g(\d+)p(\d+)(_swap)?(?:_split(\d+))?(?:_shared(\d+))?"
    r"(_pingpong)?(_dynamic)?"
)
_TILE = re.compile(r"(\d+)x(\d+)x(\d+)_s(\d+)_w(\d+)x(\d+)(_swap)?(_pingpong)?")
_SPLIT = re.compile(r"split(\d+)")


@dataclass(frozen=True)
class Choice:
    """A tile and how it is scheduled.

    Attributes:
        splits: ranges that the k-tiles of each tile are cut into; 1 for none. A Hopper tile has
            its own.
        dynamic: tiles are handed out by the hardware (cluster launch control), sm_120 only. A
            Hopper tile has its own way.
        pdl: programmatic dependent launch.
    """

    tile: Tile
    splits: int = 1
    dynamic: bool = False
    pdl: bool = False

    @property
    def name(self) -> str:
        """As :func:`parse` reads it, e.g. ``64x64x128_s6_w2x2/split4``."""
        parts = [self.tile.name]
        if self.splits > 1:
            parts.append(f"split{self.splits}")
        parts += [part for part in ("dynamic", "pdl") if getattr(self, part)]
        return "/".join(parts)

    def check(self) -> Choice:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        self.tile.check()
        if self.splits < 1:
            raise ValueError(f"config {self.name}: splits is {self.splits}, must be at least 1")
        if isinstance(self.tile, HopperTile) and (self.splits > 1 or self.dynamic):
            raise ValueError(f"config {self.name}: a Hopper tile has its own splits, a fixed list")
        return self

    @property
    def kernel(self) -> str:
        """The module of the kernel whose tile it is."""
        return HopperConfig.module if isinstance(self.tile, HopperTile) else GemmConfig.module

    def pick(self, epilogue: EpilogueConfig, variant: str, fast_accum: bool = False) -> Pick:
        """This choice for a variant and an epilogue.

        Args:
            fast_accum: where a kernel tells the difference.

        Raises:
            ValueError: no kernel can be that.
        """
        if isinstance(self.tile, HopperTile):
            return Pick(HopperConfig(self.tile, epilogue, fast_accum, self.pdl).check())
        config = GemmConfig(
            self.tile,
            epilogue,
            variant,
            split_k=self.splits > 1,
            dynamic=self.dynamic,
            pdl=self.pdl,
        )
        return Pick(config.check(), self.splits)


@dataclass(frozen=True)
class Pick:
    """A kernel, and how many splits it is launched with."""

    config: AnyGemm
    splits: int = 1

    @property
    def choice(self) -> Choice:
        """It without its epilogue and variant."""
        dynamic = isinstance(self.config, GemmConfig) and self.config.dynamic
        return Choice(self.config.tile, self.splits, dynamic, self.config.pdl)

    @property
    def name(self) -> str:
        """The choice's."""
        return self.choice.name


def spills(tile: HopperTile, epilogue: EpilogueConfig) -> bool:
    """Whether the values of a bias do not fit beside a tile's sums (seen in its machine code)."""
    if epilogue.bias is None or not (tile.m == 256 or tile.pingpong):
        return False
    # Boxes of output take the bias of few columns at a time.
    boxed = HopperConfig(tile, epilogue, fast_accum=tile.pingpong).boxes > 0
    return not boxed or tile.n > 128


def parse(name: str) -> Choice:
    """The choice of that name.

    Raises:
        ValueError: it is no such name, or the tile breaks a rule.
    """
    tile_name, *parts = name.split("/")
    hopper = _HOPPER_TILE.fullmatch(tile_name)
    if hopper is not None:
        return _hopper_choice(name, hopper, "pdl" in parts)
    match = _TILE.fullmatch(tile_name)
    if match is not None:
        m, n, k, stages, warps_m, warps_n = map(int, match.groups()[:6])
        swap, pingpong = (group is not None for group in match.groups()[6:])
        sizes = (m, n, k, warps_m, warps_n, stages)
        if min(sizes) > 0:
            splits = [int(found[1]) for part in parts if (found := _SPLIT.fullmatch(part))]
            tile = TileConfig(*sizes, swap_ab=swap, pingpong=pingpong)
            choice = Choice(tile, splits[0] if splits else 1, "dynamic" in parts, "pdl" in parts)
            if choice.name == name:  # nothing twice, out of order or left over
                return choice.check()
    raise _unknown(name)


def _hopper_choice(name: str, found: re.Match[str], pdl: bool) -> Choice:
    m, n, stages, warpgroups, part = map(int, found.groups()[:5])
    swap, splits, sharers = found[6] is not None, int(found[7] or 1), int(found[8] or 1)
    if min(m, n, stages, warpgroups, part, splits, sharers) > 0:
        pingpong, dynamic = found[9] is not None, found[10] is not None
        tile = HopperTile(m, n, part, warpgroups, stages, swap, splits, sharers, pingpong, dynamic)
        choice = Choice(tile, pdl=pdl)
        if choice.name == name:
            return choice.check()
    raise _unknown(name)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"config: got {name!r}, must be a TileConfig, a Choice or a name such as "
        "128x128x64_s6_w2x2, 16x64x128_s9_w1x2_swap or 64x64x128_s6_w2x2/split4"
    )


def choice_of(config: Choice | Pick | Tile | str) -> Choice:
    """What ``use(config=...)`` was given, as a choice.

    Raises:
        ValueError: it is none, or breaks a rule.
    """
    if isinstance(config, Choice):
        return config.check()
    if isinstance(config, Pick):
        return config.choice.check()
    if isinstance(config, TileConfig | HopperTile):
        # A Hopper tile by itself means it as it is picked.
        return Choice(config, pdl=isinstance(config, HopperTile)).check()
    return parse(str(config))
