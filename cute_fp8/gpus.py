"""What the performance model knows of each GPU: rates and sizes, from their makers' pages.

Sources. SMs, boost clocks, L2 and memory of the GeForce cards: NVIDIA's "RTX Blackwell GPU
architecture" paper, appendix A. RTX PRO 6000 and its Max-Q edition: NVIDIA's "RTX Blackwell PRO GPU
architecture" paper and their data sheets. DGX Spark: NVIDIA's hardware overview (48 SMs as 6144
cores, 273 GB/s, 31 TFLOP/s of fp32, which make 2.52 GHz). H100 SXM and H200: NVIDIA's "H100 tensor
core GPU architecture" paper (1979 TFLOP/s of FP8 make 1.83 GHz) and the H200 data sheet.

A GeForce multiplies FP8 with fp32 sums at half rate unless the MMA is block-scaled; RTX PRO parts
do not. Clocks are the rated boost clock, except where a figure under load is known: the RTX 5070 Ti
(416 and 208 TFLOP/s of block-scaled and plain MMAs, measured by others, are 2.90 GHz) and the
RTX 5090 (2.42 to 2.46 GHz at 575 W, github.com/NVIDIA/open-gpu-kernel-modules/issues/1266). Cards
with power to spare run above the rated clock, so the others' predictions err to the slow side.

No maker states the bandwidth of these GPUs' L2. Of sm_120 16 bytes per clock and SM is an
assumption: the best published GEMMs of three cards draw 12.5 to 14 through 128x128 tiles. So is 32
of Hopper: the A100's L2, built alike, was measured at 5.6 TB/s, 37 bytes per clock and SM
(github.com/RRZE-HPC/gpu-benches/issues/7, an A800).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cute_fp8.targets import Capability, capability_of_device

MB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: how people call it.
        device_names: how the driver calls it; a laptop's part or a slice of a GPU has another name.
        sms: streaming multiprocessors.
        clock_mhz: what the SMs sustain under load.
        l2_bytes: capacity of L2.
        dram_gbps: of the memory's pins, in 10^9 bytes per second.
        read_share: how much of that reads reach.
        mma_flops: floating point operations per clock and SM of the MMA that our kernels issue.
        plain_mma_flops: of the plain FP8 MMA with fp32 sums.
        l2_bytes_per_clk: what L2 delivers per clock, for each SM.
    """

    name: str
    capability: Capability
    sms: int
    clock_mhz: float
    l2_bytes: int
    dram_gbps: float
    device_names: tuple[str, ...] = ()
    read_share: float = 0.94
    mma_flops: float = 2048.0
    plain_mma_flops: float = 1024.0
    l2_bytes_per_clk: float = 16.0

    @property
    def l2_gbps(self) -> float:
        """What L2 delivers to all SMs together."""
        return self.sms * self.l2_bytes_per_clk * self.clock_mhz * 1e-3


#: The stand-in's MMA on Hopper, as fast as it was measured there (perf/results/h200: 352x1024x4096,
#: one 128x128 tile an SM, 61 us).
STAND_IN_FLOPS = 1200.0
_HOPPER: dict[str, Any] = {
    "mma_flops": STAND_IN_FLOPS,
    "plain_mma_flops": STAND_IN_FLOPS,
    "l2_bytes_per_clk": 32.0,
    "read_share": 0.875,  # 4.15 of 4.8 TB/s, measured on an H200
}
_GEFORCE = "NVIDIA GeForce RTX "
_PRO = "NVIDIA RTX PRO 6000 Blackwell "

RTX_5060_TI = Gpu(
    "RTX 5060 Ti", (12, 0), 36, 2572, 32 * MB, 448, device_names=(f"{_GEFORCE}5060 Ti",)
)
RTX_5070 = Gpu("RTX 5070", (12, 0), 48, 2512, 48 * MB, 672, device_names=(f"{_GEFORCE}5070",))
RTX_5070_TI = Gpu(
    "RTX 5070 Ti", (12, 0), 70, 2900, 48 * MB, 896, device_names=(f"{_GEFORCE}5070 Ti",)
)
RTX_5080 = Gpu("RTX 5080", (12, 0), 84, 2617, 64 * MB, 960, device_names=(f"{_GEFORCE}5080",))
RTX_5090 = Gpu("RTX 5090", (12, 0), 170, 2440, 96 * MB, 1792, device_names=(f"{_GEFORCE}5090",))
RTX_PRO_6000 = Gpu(
    "RTX PRO 6000", (12, 0), 188, 2617, 128 * MB, 1792, plain_mma_flops=2048,
    device_names=(f"{_PRO}Workstation Edition", f"{_PRO}Server Edition"),
)  # fmt: skip
RTX_PRO_6000_MAX_Q = Gpu(
    "RTX PRO 6000 Max-Q", (12, 0), 188, 2288, 128 * MB, 1792, plain_mma_flops=2048,
    device_names=(f"{_PRO}Max-Q Workstation Edition",),
)  # fmt: skip
DGX_SPARK = Gpu("DGX Spark", (12, 1), 48, 2520, 24 * MB, 273, device_names=("NVIDIA GB10",))
H100 = Gpu(
    "H100", (9, 0), 132, 1830, 50 * MB, 3352, device_names=("NVIDIA H100 80GB HBM3",), **_HOPPER
)
H200 = Gpu("H200", (9, 0), 132, 1830, 50 * MB, 4800, device_names=("NVIDIA H200",), **_HOPPER)

GPUS = (
    RTX_5060_TI,
    RTX_5070,
    RTX_5070_TI,
    RTX_5080,
    RTX_5090,
    RTX_PRO_6000,
    RTX_PRO_6000_MAX_Q,
    DGX_SPARK,
    H100,
    H200,
)
#: What stands for a GPU that is only known by its compute capability.
_TYPICAL = {(12, 1): DGX_SPARK, (9, 0): H200}


def named(name: str) -> Gpu:
    """The GPU that people or the driver call so, in any case; ``RTX`` may be left out.

    Raises:
        ValueError: none of :data:`GPUS`.
    """
    wanted = name.casefold().removeprefix("rtx ")
    for gpu in GPUS:
        names = {n.casefold() for n in (gpu.name, gpu.name.removeprefix("RTX "), *gpu.device_names)}
        if wanted in names or name.casefold() in names:
            return gpu
    raise ValueError(f"gpu: got {name!r}, must be one of {', '.join(g.name for g in GPUS)}")


def of_capability(capability: Capability) -> Gpu:
    """A typical GPU of that compute capability, where no GPU is named."""
    return _TYPICAL.get(capability, RTX_5090)


def of_device(device: torch.device) -> Gpu:
    """The GPU behind a CUDA device: from :data:`GPUS` by its name, else from its properties.

    Raises:
        ValueError: no CUDA device.
    """
    if capability_of_device(device) is None:
        raise ValueError(f"device: got {device}, must be a CUDA device")
    index: int | None = device.index  # torch's stubs forget that it may be absent
    return _of_index(torch.cuda.current_device() if index is None else index)


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device: the CTAs of a persistent kernel."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _of_index(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return of_properties(properties, (properties.major, properties.minor))


def of_properties(properties: Any, capability: Capability) -> Gpu:
    """:func:`of_device` of what ``torch.cuda.get_device_properties`` returned.

    What an unknown GPU's properties do not say is taken from a typical one, memory by its SMs.
    """
    for gpu in GPUS:
        if properties.name in gpu.device_names and properties.multi_processor_count == gpu.sms:
            return gpu
    typical = of_capability(capability)
    sms = int(properties.multi_processor_count)
    # In kHz, and of memory that moves two words per clock; older torch has none of these.
    clock = getattr(properties, "clock_rate", 0) * 1e-3
    bus = getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0)
    return Gpu(
        name=str(properties.name),
        capability=capability,
        sms=sms,
        clock_mhz=clock or typical.clock_mhz,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)) or typical.l2_bytes,
        dram_gbps=2 * bus / 8 * 1e-6 or typical.dram_gbps * sms / typical.sms,
        read_share=typical.read_share,
        mma_flops=typical.mma_flops,
        plain_mma_flops=typical.plain_mma_flops,
        l2_bytes_per_clk=typical.l2_bytes_per_clk,
    )
