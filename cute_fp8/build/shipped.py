"""What ``compile`` makes ready: the usual kernels of a target, or what given sizes take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch

import torch

from cute_fp8.dispatch import explain
from cute_fp8.dtypes import dtype_named
from cute_fp8.gemms.choice import spills
from cute_fp8.kernels.config import (
    MX_BLOCK,
    MX_OUT,
    N_MULTIPLE,
    OUT_DTYPES,
    EpilogueConfig,
    GemmConfig,
    RelayoutConfig,
    TileConfig,
)
from cute_fp8.kernels.config_sm90 import HopperConfig
from cute_fp8.kernels.configs import Config
from cute_fp8.kernels.mlp_config import shipped_mlps
from cute_fp8.kernels.projection_config import shipped_projections
from cute_fp8.kernels.rope_config import RopeConfig, shipped_ropes
from cute_fp8.kernels.row_config import VIEWS, RowConfig, rows_of, shipped_rows
from cute_fp8.kernels.tiles import TILES
from cute_fp8.kernels.tiles_sm90 import TILES_SM90
from cute_fp8.targets import ROWS_ONLY, capability_of_device, capability_of_target

#: M, N, K.
Shape = tuple[int, int, int]

#: The epilogues that ``compile`` builds; any other combination is compiled at its first call.
EPILOGUES = (
    *(EpilogueConfig(out=out) for out in OUT_DTYPES),
    EpilogueConfig(bias="bfloat16"),
    EpilogueConfig(residual="bfloat16"),
    EpilogueConfig(bias="bfloat16", residual="bfloat16"),
    EpilogueConfig(bias="bfloat16", activation="gelu"),
    EpilogueConfig(activation="silu"),
    EpilogueConfig(activation="silu", gated=True),
)
#: And for MXFP8 inputs those with MXFP8 output.
MX_EPILOGUES = (
    EpilogueConfig(MX_OUT),
    EpilogueConfig(MX_OUT, activation="silu", gated=True),
)


def shipped_configs(
    ops: str | None = None, target: str | None = None, *, stand_in: bool = False
) -> list[Config]:
    """The configurations that ``compile`` builds: every tile with every epilogue of
    :data:`EPILOGUES`, with split-K and the plain one; and the usual row kernels.

    Args:
        ops: a glob over their names, e.g. ``gemm_per_token-128x128*``; None for all.
        target: leave out what is not meant for it; None for all of sm_120.
        stand_in: for sm_90a, the sm_120 kernel in place of Hopper's own.

    Raises:
        ValueError: nothing matches.
    """
    configs: list[Config]
    if target == "sm_90a" and not stand_in:
        # Those with registers for promotion, which is the default.
        hopper = [tile for tile in TILES_SM90 if tile.fits(fast_accum=False)]
        pairs = [(tile, epilogue) for tile in hopper for epilogue in EPILOGUES]
        configs = [HopperConfig(*pair) for pair in pairs if not spills(*pair)]
    else:
        space = [(tile, variant) for variant, tiles in TILES.items() for tile in tiles]
        configs = [config for tile, variant in space for config in _of(tile, variant)]
        configs.append(RelayoutConfig())
    pdl = target is None or capability_of_target(target) >= (9, 0)
    configs += [*shipped_rows(pdl), *shipped_ropes(pdl)]
    configs += [*shipped_projections(target), *shipped_mlps(target)]
    if target in ROWS_ONLY:
        configs = [config for config in configs if isinstance(config, RowConfig | RopeConfig)]
    return matching(configs, ops)


def configs_of(
    shapes: Iterable[Shape], target: str, device: torch.device | None = None
) -> list[Config]:
    """What GEMMs of these sizes take on a device, or on what a target is named after: as
    selection picks it, with each of the usual epilogues; and the producers of their K.

    Raises:
        ValueError: a shape that no GEMM has.
    """
    capability = capability_of_target(target) if device is None else capability_of_device(device)
    found: dict[Config, None] = {}
    for m, n, k in shapes:
        problems = [("per_token", epilogue) for epilogue in EPILOGUES]
        if k % MX_BLOCK == 0:
            problems += [("mxfp8", epilogue) for epilogue in (*EPILOGUES, *MX_EPILOGUES)]
        for variant, epilogue in problems:
            unit = (MX_BLOCK if epilogue.mx else N_MULTIPLE) * (1 + epilogue.gated)
            if n % unit and unit > N_MULTIPLE:
                continue  # these sizes have all but this epilogue
            route = explain(
                "gemm_gated" if epilogue.gated else "gemm",
                m=m,
                n=n,
                k=k,
                variant=variant,
                capability=capability,
                device=device,
                out_dtype=getattr(torch, epilogue.out),
                bias=dtype_named(epilogue.bias),
                residual=dtype_named(epilogue.residual),
                activation=epilogue.activation,
            ).route
            if route is not None and route.pick is not None:
                found[route.pick.config] = None
        pdl = capability is not None and capability >= (9, 0)
        variants = {variant for variant, _ in problems}
        rows = [config for config in rows_of(k) if config.variant in variants]
        rows += [replace(c, view=v) for c in rows if c.op == "quantize" for v in VIEWS[1:]]
        found.update((replace(config, pdl=pdl), None) for config in rows)
    return list(found)


def matching(configs: list[Config], ops: str | None) -> list[Config]:
    """Those whose names match the glob ``ops``; None for all.

    Raises:
        ValueError: nothing matches.
    """
    chosen = [config for config in configs if ops is None or fnmatch(config.name, ops)]
    if not chosen:
        raise ValueError(f"ops: got {ops!r}, must match a kernel name such as {configs[0].name}")
    return chosen


def _of(tile: TileConfig, variant: str) -> Iterator[GemmConfig]:
    """What is shipped of a tile, as far as it can be built."""
    epilogues = EPILOGUES + (MX_EPILOGUES if variant == "mxfp8" else ())
    configs = [GemmConfig(tile, epilogue, variant) for epilogue in epilogues]
    for config in (*configs, GemmConfig(tile, EpilogueConfig(), variant, split_k=True)):
        with suppress(ValueError):
            yield config.check()
