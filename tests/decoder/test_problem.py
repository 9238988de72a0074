"""The decoder's own kernels in the dispatch table."""

from __future__ import annotations

import pytest
import torch

import cute_fp8
from cute_fp8.build import shipped
from cute_fp8.decoder import lookup
from cute_fp8.decoder.problem import rope_problem
from cute_fp8.kernels.rope_config import RopeConfig
from cute_fp8.targets import ROWS_ONLY, TARGETS


@pytest.mark.parametrize("capability", [(12, 0), (12, 1), (9, 0), (8, 9), (10, 0)], ids=str)
def test_rope_has_a_kernel(capability: tuple[int, int]) -> None:
    found = cute_fp8.explain("rope_append", m=4, k=1024, variant="any", capability=capability)
    assert found.route is not None and isinstance(found.route.block, RopeConfig)
    assert found.route.block.pdl is (capability >= (9, 0))
    assert f"cute:rope_append for {found.route.target}, rope_append-bfloat16-128" in str(found)


@pytest.mark.parametrize("capability", [(8, 6), (10, 3), None], ids=str)
def test_elsewhere_rope_is_plain_torch(capability: tuple[int, int] | None) -> None:
    options = {"variant": "any", "capability": capability, "device": "cpu"}
    found = cute_fp8.explain("rope_append", m=4, k=1024, **options)
    assert found.route is not None and found.route.entry.name == "reference:reference"


def test_the_reference_can_be_asked_for() -> None:
    options = {"variant": "any", "capability": (12, 0), "backend": "torch"}
    found = cute_fp8.explain("rope_append", m=4, k=1024, **options)
    assert found.route is not None and found.route.entry.backend == "reference"


@pytest.mark.parametrize("target", TARGETS)
def test_rope_kernels_are_shipped(target: str) -> None:
    configs = shipped.shipped_configs("rope_append-*", target)
    assert len(configs) == 5 and all(isinstance(config, RopeConfig) for config in configs)
    assert {config.pdl for config in configs} == {target != "sm_89"}
    assert (target in ROWS_ONLY) == (not compiler_ships(target, "gemm*"))


def compiler_ships(target: str, ops: str) -> bool:
    try:
        return bool(shipped.shipped_configs(ops, target))
    except ValueError:
        return False


def test_a_kernel_is_looked_up_once_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(lookup, "_kernels", {})
    monkeypatch.setattr(lookup, "_select", lambda problem: made.append(problem))
    problem = rope_problem(4, 96, RopeConfig("bfloat16", 32), torch.device("cpu"))
    for _ in range(2):
        assert lookup.kernel_of("rope_append", (4, 96), lambda: problem) is None
    assert len(made) == 1
    with cute_fp8.use(pdl=False):
        lookup.kernel_of("rope_append", (4, 96), lambda: problem)
    lookup.kernel_of("projection", (4, 96), lambda: problem)
    assert len(made) == 3
