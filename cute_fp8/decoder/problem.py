"""The decoder's own kernels (MLP, projection, RoPE), as the dispatch table is asked about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cute_fp8.dtypes import dtype_name
from cute_fp8.kernels.config import N_MULTIPLE, SMEM_LIMIT_SM120
from cute_fp8.kernels.config_sm90 import SMEM_LIMIT_SM90
from cute_fp8.kernels.configs import FusedConfig
from cute_fp8.kernels.mlp_config import (
    HIDDEN_MULTIPLE,
    MAX_HIDDEN,
    mlp_config,
    most_tokens,
)
from cute_fp8.kernels.projection_config import (
    HOPPER_TOKENS,
    HOPPER_WEIGHT,
    MAX_K,
    ROWS,
    faster_on_hopper,
    projection_config,
    room_for,
)
from cute_fp8.kernels.rope_config import RopeConfig

#: Tokens up to which the MLP half is one launch.
MOST_TOKENS = most_tokens(hopper=False)
#: Tokens up to which a projection is one launch with what is before it.
MOST_PROJECTED = max(ROWS)
#: Such ops, with the variant that each has in the table.
OPS = {"rope_append": "any", "projection": "per_token", "decoder_mlp": "per_token"}


@dataclass(frozen=True)
class BlockProblem:
    """A checked call without its data.

    Attributes:
        op: as the dispatch table has it.
        m, k: tokens, and the width of what is read.
        configure: from a number of multiprocessors and a target's shared memory to the kernel.
        refusal: why no kernel of ours serves it, or None.
        n: the width of what is written, where it decides something.
    """

    op: str
    m: int
    k: int
    device: torch.device
    configure: Callable[[int, int], FusedConfig]
    refusal: str | None = None
    n: int = 0

    @property
    def variant(self) -> str:
        """As the dispatch table has it."""
        return OPS[self.op]

    def config(self, sms: int, smem_limit: int, pdl: bool) -> FusedConfig:
        """The kernel on a GPU."""
        return replace(self.configure(sms, smem_limit), pdl=pdl).check()


def may_be_few(m: int | torch.SymInt, most: int) -> bool:
    """Whether so many tokens may have one launch, as far as tracing can know.

    What is exported for any number would be fixed to a few by asking: its ops ask when they run.
    """
    return not isinstance(m, int) or 0 < m <= most


def mlp_refusal(problem: BlockProblem) -> str | None:
    """Why the MLP's kernel does not serve a problem, or None: an entry of the dispatch table."""
    return problem.refusal


def mlp_refusal_on_hopper(problem: BlockProblem) -> str | None:
    """Why the MLP's kernel does not serve a problem on Hopper, or None.

    Launches in parts are the faster way there from fewer tokens on.
    """
    most = most_tokens(hopper=True)
    if problem.refusal is None and problem.m > most:
        return f"M = {problem.m}, must be from 1 to {most}"
    return problem.refusal


def projection_refusal(problem: BlockProblem) -> str | None:
    """Why the projection's kernel does not serve a problem on sm_120 and its like, or None.

    Their shared memory may have no room for its tokens.
    """
    return problem.refusal or _no_room(problem, SMEM_LIMIT_SM120)


def projection_refusal_on_hopper(problem: BlockProblem) -> str | None:
    """Why the projection's kernel does not serve a problem on Hopper, or None.

    Launches in parts are the faster way there from smaller weights and fewer tokens on.
    """
    m, n, k = problem.m, problem.n, problem.k
    if problem.refusal is None and not faster_on_hopper(m, n, k):
        return (
            f"N * K = {n} * {k}, M * K = {m} * {k}, must be at most {HOPPER_WEIGHT} and "
            f"{HOPPER_TOKENS}"
        )
    return problem.refusal or _no_room(problem, SMEM_LIMIT_SM90)


def _no_room(problem: BlockProblem, smem: int) -> str | None:
    if room_for(problem.m, problem.k, smem):
        return None
    return f"M * K = {problem.m} * {problem.k}, must leave room in {smem} bytes of shared memory"


def rope_problem(m: int, columns: int, config: RopeConfig, device: torch.device) -> BlockProblem:
    """Of :mod:`cute_fp8.decoder.rope`."""
    return BlockProblem("rope_append", m, columns, device, lambda sms, smem: config)


def mlp_problem(
    m: int,
    hidden: int,
    ffn: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.bfloat16,
) -> BlockProblem:
    """Of :mod:`cute_fp8.decoder.mlp`."""

    def configure(sms: int, smem: int) -> FusedConfig:
        names = {"dtype": dtype_name(dtype), "weight": dtype_name(weight)}
        return mlp_config(m, hidden, ffn, sms=sms, smem_limit=smem, **names)

    reason = None
    if not 0 < m <= MOST_TOKENS:
        reason = f"M = {m}, must be from 1 to {MOST_TOKENS}"
    elif hidden > MAX_HIDDEN:
        reason = f"hidden = {hidden}, must be at most {MAX_HIDDEN}"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"x is {dtype}, must be bfloat16 or float16"
    return BlockProblem("decoder_mlp", m, hidden, device, configure, reason)


def projection_problem(
    m: int,
    n: int,
    k: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    norm: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    *,
    residual: bool = False,
) -> BlockProblem:
    """Of :mod:`cute_fp8.decoder.projection`."""

    def configure(sms: int, smem: int) -> FusedConfig:
        return projection_config(
            m,
            n,
            k,
            sms=sms,
            smem_limit=smem,
            dtype=dtype_name(dtype),
            weight=dtype_name(norm),
            bias=dtype_name(bias),
            residual=residual,
        )

    reason = None
    if not 0 < m <= MOST_PROJECTED:
        reason = f"M = {m}, must be from 1 to {MOST_PROJECTED}"
    elif k > MAX_K:
        reason = f"K = {k}, must be at most {MAX_K}"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"x is {dtype}, must be bfloat16 or float16"
    return BlockProblem("projection", m, k, device, configure, reason, n)


def without_data(op: str, m: int, n: int | None, k: int, device: torch.device) -> BlockProblem:
    """A bf16 call with the usual sizes of a head: for ``explain``.

    n: the FFN's width, or a projection's outputs; a projection's x is normalised.
    """
    if op == "rope_append":
        return rope_problem(m, k, RopeConfig("bfloat16", 128), device)
    multiple = HIDDEN_MULTIPLE if op == "decoder_mlp" else N_MULTIPLE
    if n is None or min(m, n, k) <= 0 or n % multiple or k % HIDDEN_MULTIPLE:
        each = f"n and k multiples of {HIDDEN_MULTIPLE}"
        if op == "projection":
            each = f"n a multiple of {N_MULTIPLE}, k of {HIDDEN_MULTIPLE}"
        raise ValueError(f"m, n, k: got {m}, {n}, {k}, must be sizes, {each}")
    if op == "projection":
        return projection_problem(m, n, k, device, norm=torch.bfloat16)
    return mlp_problem(m, k, n, device)
