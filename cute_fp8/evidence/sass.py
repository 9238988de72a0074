"""Reading a compiled kernel's machine code: disassemble a cubin and count what its main loop does.

Static facts about the code, not measurements. Needs NVIDIA's ``nvdisasm`` and ``cuobjdump``, which
PyPI has (``pip install 'cute-fp8[cli]'``), or those of a CUDA toolkit on the ``PATH``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: What the compiler pads sm_120 code with between dependent instructions; it computes nothing.
FILLER = "UIADD3 URZ, UPT, UPT, URZ, URZ, URZ"
#: Tensor-core instructions of any generation.
_MMA = re.compile(r"\b((?:UTC[A-Z]?|[A-Z]G?)MMA(?:\.\w+)*)")
#: Loads and stores of local memory, predicated or not.
_LOCAL = re.compile(r"(?:@!?\w+\s+)?(?:STL|LDL)\b")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")
_RESOURCES = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass(frozen=True)
class Code:
    """What the machine code of one kernel says.

    Attributes:
        mma: distinct tensor-core instructions, e.g. ``QMMA.SF.16832.F32.E4M3.E4M3.E8``.
        registers: per thread.
        stack, local: bytes per thread.
        spills: loads and stores of spilled registers.
        tma_loads: TMA tensor loads (``UTMALDG``).
        loop_mma, loop_others: instructions of the main loop: tensor-core, and all others but
            filler.
    """

    mma: tuple[str, ...]
    registers: int
    stack: int
    local: int
    spills: int
    tma_loads: int
    loop_mma: int
    loop_others: int

    @property
    def others_per_mma(self) -> float:
        """Instructions of the main loop beside each tensor-core instruction; filler left out."""
        return self.loop_others / self.loop_mma if self.loop_mma else float("inf")


def read_cubin(path: Path) -> Code:
    """Disassemble the cubin at ``path`` and read it.

    Raises:
        RuntimeError: the disassembler is missing or fails.
    """
    listing = _run("nvdisasm", "-c", str(path))
    resources = _RESOURCES.search(_run("cuobjdump", "--dump-resource-usage", str(path)))
    if resources is None:
        raise RuntimeError(
            f"cuobjdump: got no resource usage of {path.name}, must be a cubin with a kernel"
        )
    registers, stack, _, local = map(int, resources.groups())
    instructions, labels = _parse(listing)
    loop = main_loop(instructions, labels)
    loop_mma = sum(map(is_mma, loop))
    return Code(
        mma=tuple(sorted({name for text in instructions if (name := mma_name(text))})),
        registers=registers,
        stack=stack,
        local=local,
        spills=listing.count("SpillRefill")
        + sum(_LOCAL.match(text) is not None for text in instructions),
        tma_loads=sum("UTMALDG" in text for text in instructions),
        loop_mma=loop_mma,
        loop_others=sum(FILLER not in text for text in loop) - loop_mma,
    )


def mma_name(text: str) -> str | None:
    """The tensor-core instruction in one line of SASS, or None."""
    found = _MMA.search(text)
    return found.group(1) if found else None


def is_mma(text: str) -> bool:
    """Whether one line of SASS is a tensor-core instruction."""
    return mma_name(text) is not None


def main_loop(instructions: list[str], labels: dict[str, int]) -> list[str]:
    """The instructions of the shortest loop (a backward branch) that holds tensor-core
    instructions.
    """
    loops = []
    for end, text in enumerate(instructions):
        branch = _BRANCH.search(text)
        begin = labels.get(branch.group(1), end + 1) if branch else end + 1
        if begin <= end and any(map(is_mma, instructions[begin : end + 1])):
            loops.append(instructions[begin : end + 1])
    return min(loops, key=len, default=[])


def _parse(listing: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in order, and the index that each label stands before."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction.group(1))
    return instructions, labels


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [find_tool(tool), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{tool}: got exit status {done.returncode} ({done.stderr.strip()[:200]}), must be 0"
        )
    return done.stdout


@cache
def find_tool(tool: str) -> str:
    """Path of a CUDA binary tool: PyPI's wheels put them under ``nvidia/<something>/bin``.

    Raises:
        RuntimeError: it is nowhere.
    """
    site = Path(sysconfig.get_path("purelib"))
    for candidate in sorted(site.glob(f"nvidia/*/bin/{tool}"), reverse=True):
        return str(candidate)
    found = shutil.which(tool)
    if found is None:
        raise RuntimeError(
            f"{tool}: got nothing on PATH, must be installed: pip install 'cute-fp8[cli]'"
        )
    return found
