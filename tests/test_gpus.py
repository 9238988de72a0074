"""Which GPU is which, and what an unknown one is taken for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_fp8 import gpus
from cute_fp8.gpus import GPUS


def properties(name: str, **changes: Any) -> SimpleNamespace:
    """Device properties, as torch gives them of a GPU nobody knows."""
    facts = {
        "name": name,
        "multi_processor_count": 60,
        "L2_cache_size": 40 * gpus.MB,
        "clock_rate": 2_500_000,
        "memory_clock_rate": 14_001_000,
        "memory_bus_width": 192,
        **changes,
    }
    return SimpleNamespace(**facts)


@pytest.mark.parametrize(
    ("device", "sms", "name"),
    [
        ("NVIDIA GeForce RTX 5060 Ti", 36, "RTX 5060 Ti"),
        ("NVIDIA GeForce RTX 5070", 48, "RTX 5070"),
        ("NVIDIA GeForce RTX 5070 Ti", 70, "RTX 5070 Ti"),
        ("NVIDIA GeForce RTX 5080", 84, "RTX 5080"),
        ("NVIDIA GeForce RTX 5090", 170, "RTX 5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 188, "RTX PRO 6000 Max-Q"),
        ("NVIDIA GB10", 48, "DGX Spark"),
        ("NVIDIA H100 80GB HBM3", 132, "H100"),
        ("NVIDIA H200", 132, "H200"),
    ],
)
def test_known_devices(device: str, sms: int, name: str) -> None:
    capability = gpus.named(name).capability
    found = gpus.of_properties(properties(device, multi_processor_count=sms), capability)
    assert found is gpus.named(name) and found.sms == sms


@pytest.mark.parametrize(
    ("device", "sms"),
    [
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 82),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 46),
        ("NVIDIA GeForce RTX 5090 D", 170),
        ("NVIDIA H200 MIG 1g.18gb", 16),
        ("NVIDIA H100 PCIe", 114),
        ("NVIDIA H200", 66),  # under a partition that keeps the name
    ],
)
def test_other_parts_of_like_names_are_not_taken_for_them(device: str, sms: int) -> None:
    capability = (9, 0) if "H" in device else (12, 0)
    found = gpus.of_properties(properties(device, multi_processor_count=sms), capability)
    assert found not in GPUS
    assert (found.name, found.sms, found.capability) == (device, sms, capability)


def test_an_unknown_gpu_is_read_from_its_properties() -> None:
    found = gpus.of_properties(properties("NVIDIA Something"), (12, 0))
    assert (found.sms, found.clock_mhz, found.l2_bytes) == (60, 2500, 40 * gpus.MB)
    assert found.dram_gbps == pytest.approx(672, rel=1e-3)  # 192 bits at 28 Gbit/s
    assert found.mma_flops == gpus.RTX_5090.mma_flops


def test_what_properties_do_not_say_is_taken_from_a_typical_gpu() -> None:
    bare = SimpleNamespace(name="NVIDIA Something", multi_processor_count=85)
    found = gpus.of_properties(bare, (12, 0))
    assert found.clock_mhz == gpus.RTX_5090.clock_mhz
    assert found.l2_bytes == gpus.RTX_5090.l2_bytes
    assert found.dram_gbps == gpus.RTX_5090.dram_gbps / 2
    hopper = gpus.of_properties(bare, (9, 0))
    assert hopper.mma_flops == gpus.STAND_IN_FLOPS


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_names_find_their_gpu(gpu: gpus.Gpu) -> None:
    for name in (gpu.name, gpu.name.lower(), gpu.name.removeprefix("RTX "), *gpu.device_names):
        assert gpus.named(name) is gpu


def test_names_are_distinct() -> None:
    names = [name for gpu in GPUS for name in (gpu.name, *gpu.device_names)]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpu: got 'RTX 9999', must be one of RTX 5060 Ti, ") as e:
        gpus.named("RTX 9999")
    assert "\n" not in str(e.value)


def test_the_rated_rates_are_those_that_the_makers_state() -> None:
    """FP8 TFLOP/s with fp32 sums, half the block-scaled rate on GeForce; GB10's sparse FP4."""
    stated = {"RTX 5080": 225.1, "RTX 5070": 123.5}
    for name, tflops in stated.items():
        gpu = gpus.named(name)
        plain = gpu.sms * gpu.plain_mma_flops * gpu.clock_mhz * 1e-6
        assert plain == pytest.approx(tflops, rel=0.01)
    spark = gpus.DGX_SPARK
    fp4 = spark.sms * 2 * spark.mma_flops * spark.clock_mhz * 1e-6
    assert 2 * fp4 == pytest.approx(1000, rel=0.02)  # one petaflop, of sparse FP4
    assert gpus.RTX_5070_TI.sms * 2048 * 2.9e-3 == pytest.approx(416, rel=0.01)


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [
        properties(f"NVIDIA GeForce RTX {name}", multi_processor_count=sms, major=12, minor=0)
        for name, sms in (("5080", 84), ("5090", 170))
    ]
    current = [0]
    monkeypatch.setattr(gpus, "capability_of_device", lambda device: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: here[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    gpus._of_index.cache_clear()
    try:
        for current[0], name in ((0, "RTX 5080"), (1, "RTX 5090")):
            assert gpus.of_device(torch.device("cuda")).name == name
            assert gpus.of_device(torch.device("cuda", 1 - current[0])).name != name
    finally:
        gpus._of_index.cache_clear()


def test_of_device_wants_a_gpu() -> None:
    with pytest.raises(ValueError, match="device: got cpu, must be a CUDA device"):
        gpus.of_device(torch.device("cpu"))
