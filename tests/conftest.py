"""Markers for GPUs: the same tests run natively on an owner's sm_120 and through the stand-in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import perf_package  # noqa: F401
import pytest
import torch
from _pytest.junitxml import xml_key
from cache_fakes import load_fake
from torch.profiler import ProfilerActivity, profile

# No test may depend on what an earlier process left on disk; set it to share compilations.
os.environ.setdefault("CUTE_FP8_CACHE_DIR", "off")

import cute_fp8
from cute_fp8.build import cache, compiler
from cute_fp8.environment import environment
from cute_fp8.evidence.gpu_tests import MADE_WITH

#: How a test of the sm_120 kernel reaches it: natively, or its body on a Hopper GPU.
BACKENDS = (
    pytest.param("cute", marks=pytest.mark.needs_cc(12)),
    pytest.param("stand-in", marks=pytest.mark.needs_cc(9)),
)


def pytest_sessionstart(session: pytest.Session) -> None:
    """A JUnit report says what it is of: see ``python -m cute_fp8 validate --reports``."""
    xml = session.config.stash.get(xml_key, None)
    if xml is not None:
        facts = environment()
        for name in MADE_WITH:
            xml.add_global_property(name, facts[name])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the machine cannot run, and say why."""
    if any(item.iter_markers("gpu")) and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, there is none")
    for marker in item.iter_markers("needs_cc"):
        major = marker.args[0]
        if not torch.cuda.is_available():
            pytest.skip(f"needs a GPU of compute capability {major}.x, there is no CUDA GPU")
        have = torch.cuda.get_device_capability()
        if have[0] != major:
            pytest.skip(f"needs compute capability {major}.x, this GPU has {have[0]}.{have[1]}")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    """Every test that takes this runs the sm_120 kernel, or is skipped."""
    with cute_fp8.use(backend=request.param):
        yield request.param


@pytest.fixture
def launched() -> Callable[[Callable[[], object]], list[str]]:
    """What a call launches on the GPU: a function from the call to the names of its kernels."""

    def names(call: Callable[[], object]) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            call()
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        return [event.name for event in recorded.events() if event.device_type == on_gpu]

    return names


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, of a process that has not seen any."""
    path = tmp_path / "cache"
    monkeypatch.setenv(cache.VARIABLE, str(path))
    monkeypatch.setattr(cache, "_stats", cache.Stats())
    monkeypatch.setattr(cache, "_read_only", set())
    monkeypatch.setattr(cache, "_warned", set())
    compiler.forget()
    yield path
    compiler.forget()


@pytest.fixture
def fake_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with a loader that takes what a ``Fake`` exports."""
    monkeypatch.setattr(cache, "_load_object", load_fake)
    return cache_folder
