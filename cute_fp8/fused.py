"""Kernels that are no GEMM and no producer, as the dispatch table is asked about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cute_fp8.kernels.configs import FusedConfig
from cute_fp8.kernels.rope_config import RopeConfig

#: Such ops, with the variant that each has in the table.
OPS = {"rope_append": "any"}


@dataclass(frozen=True)
class FusedProblem:
    """A checked call without its data.

    Attributes:
        op: as the dispatch table has it.
        m, k: tokens, and the width of what is read.
        refusal: why no kernel of ours serves it, or None.
        configure: from a number of multiprocessors and a target's shared memory to the kernel.
    """

    op: str
    m: int
    k: int
    device: torch.device
    configure: Callable[[int, int], FusedConfig]
    refusal: str | None = None

    @property
    def variant(self) -> str:
        """As the dispatch table has it."""
        return OPS[self.op]

    def config(self, sms: int, smem_limit: int, pdl: bool) -> FusedConfig:
        """The kernel on a GPU."""
        return replace(self.configure(sms, smem_limit), pdl=pdl).check()


def refusal(problem: FusedProblem) -> str | None:
    """Why a problem has no kernel, as an entry of the table says it."""
    return problem.refusal


def rope_problem(m: int, columns: int, config: RopeConfig, device: torch.device) -> FusedProblem:
    """Of :mod:`cute_fp8.rope`."""
    return FusedProblem("rope_append", m, columns, device, lambda sms, smem: config)


def without_data(op: str, m: int, k: int, device: torch.device) -> FusedProblem:
    """A bf16 call with the usual sizes of a head: for ``explain``."""
    return rope_problem(m, k, RopeConfig("bfloat16", 128), device)
