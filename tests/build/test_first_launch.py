"""The first launch of a kernel has the arguments that the kernel was compiled for."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from cute_fp8.build.first_launch import ARGUMENTS, Zeros
from cute_fp8.build.kernel_sources import digests
from cute_fp8.build.shipped import shipped_configs
from cute_fp8.kernels.config_sm90 import HopperConfig


def rank(argument: object) -> int | None:
    """Of a tensor, real or the compiler's; 0 of a number."""
    return None if argument is None else len(getattr(argument, "shape", ()))


@pytest.mark.parametrize("target", ["sm_120a", "sm_90a", "sm_89"])
def test_tensors_where_the_kernel_takes_them(target: str) -> None:
    for config in shipped_configs(target=target):
        _, taken = import_module(f"cute_fp8.kernels.{config.module}").make(config, target)
        found = ARGUMENTS[config.module](config, Zeros(torch.device("cpu")))
        # Last comes the stream, which the environment has.
        assert [*map(rank, found)] == [*map(rank, taken[:-1])], config.name


def test_every_kernel_has_arguments() -> None:
    assert ARGUMENTS.keys() == digests().keys()


def test_a_cluster_has_room() -> None:
    """A grid of no cluster is none."""
    clusters = [c for c in shipped_configs(target="sm_90a") if isinstance(c, HopperConfig)]
    assert any(config.tile.cluster > 1 for config in clusters)
    for config in clusters:
        multiprocessors = ARGUMENTS[config.module](config, Zeros(torch.device("cpu")))[-1]
        assert multiprocessors >= config.tile.cluster, config.name
