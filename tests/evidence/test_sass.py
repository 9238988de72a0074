"""Reading machine code, on listings small enough to count by eye."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cute_fp8.evidence import sass
from cute_fp8.evidence.sass import FILLER, Code, is_mma, main_loop, mma_name, read_cubin

QMMA = "QMMA.SF.16832.F32.E4M3.E4M3.E8 R8, R4, R2, R8, R20, URZ, R20, URZ"
PLAIN = "QMMA.16832.F32.E4M3.E4M3 R8, R4, R2, R8"
CLEAN = "REG:64 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:1000 TEXTURE:0"


def listing(*lines: str) -> str:
    """As ``nvdisasm -c`` prints it; a line that ends with a colon is a label."""
    text = ["\t.target\tsm_120a", "", ".text.kernel:"]
    for address, line in enumerate(lines):
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{16 * address:04x}*/                   {line} ;")
    return "\n".join([*text, ".L_end:", ""])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Code]:
    """``read_cubin`` with the two tools' outputs given."""

    def read(*lines: str, resources: str = CLEAN) -> Code:
        outputs = {"nvdisasm": listing(*lines), "cuobjdump": f" Function kernel:\n  {resources}\n"}
        monkeypatch.setattr(sass, "_run", lambda tool, *arguments: outputs[tool])
        return read_cubin(Path("kernel.cubin"))

    return read


@pytest.mark.parametrize(
    "name",
    [
        "QMMA.SF.16832.F32.E4M3.E4M3.E8",
        "QMMA.16832.F32.E4M3.E4M3",
        "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
        "HMMA.16816.F32",
        "HMMA.16816.F32.BF16",
        "IMMA.16832.S8.S8",
        "DMMA.8x8x4",
        "HGMMA.64x256x16.F32.BF16",
        "QGMMA.64x128x32.F32.E4M3.E4M3",
        "UTCHMMA.2CTA",
        "UTCQMMA",
        "UTCOMMA.BLOCK16",
    ],
)
def test_tensor_core_instructions(name: str) -> None:
    for text in (f"{name} R8, R4, R2, R8", f"@!P0 {name} gdesc[UR4], tmem[UR8]", name):
        assert mma_name(text) == name
        assert is_mma(text)


@pytest.mark.parametrize(
    "text",
    [
        "IMAD.MOV.U32 R1, RZ, RZ, R2",
        "IMAD.WIDE.U32 R2, R3, R4, R6",
        "FMUL R8, R8, R20",
        "FFMA R8, R8, R20, R2",
        "HFMA2.MMA R2, -RZ, RZ, 0, 0",
        "HADD2.F32 R2, -RZ, R3.H0_H0",
        "FMNMX R2, R3, R4, !PT",
        "LDSM.16.M88.4 R4, [R2+UR4]",
        "UTMALDG.2D [UR8], [UR4]",
        "UTCBAR [UR4], URZ",
        "UTCCP.T.S.128dp128bit tmem[UR4], gdesc[UR6]",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3",
        FILLER,
    ],
)
def test_other_instructions(text: str) -> None:
    assert mma_name(text) is None
    assert not is_mma(text)


def loop(*lines: str) -> list[str]:
    return main_loop(*sass._parse(listing(*lines)))


def test_the_innermost_loop_with_tensor_cores_is_the_main_loop() -> None:
    """Tiles outside, k-tiles inside, and inside those a wait without any tensor-core work."""
    body = [
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3",
        "@!P0 BRA `(.L_wait)",
        "LDSM.16.M88.4 R4, [R2]",
        QMMA,
        QMMA,
        "@P1 BRA `(.L_k)",
    ]
    lines = [
        "S2R R0, SR_TID.X",
        ".L_tile:",
        "MOV R8, RZ",
        ".L_k:",
        ".L_wait:",
        *body,
        "STG.E.128 [R2], R8",
        "@P2 BRA `(.L_tile)",
        "EXIT",
    ]
    assert loop(*lines) == body


def test_of_two_loops_with_tensor_cores_the_shorter_is_taken() -> None:
    short = [QMMA, "BRA.U UP0, `(.L_b)"]
    assert loop(".L_a:", "NOP", QMMA, "BRA `(.L_a)", ".L_b:", *short) == short


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (QMMA, "EXIT"),
        (".L_a:", "FMUL R1, R2, R3", "@P0 BRA `(.L_a)", QMMA),
        ("BRA `(.L_a)", QMMA, ".L_a:", "EXIT"),
        (QMMA, "BRA `(.L_elsewhere)"),
    ],
    ids=["empty", "no-loop", "loop-without", "forward-branch", "unknown-label"],
)
def test_no_main_loop(lines: tuple[str, ...]) -> None:
    assert loop(*lines) == []


def test_a_branch_to_itself_is_no_main_loop() -> None:
    assert loop(QMMA, ".L_trap:", "BRA `(.L_trap)") == []


def test_what_the_main_loop_does_besides(read: Callable[..., Code]) -> None:
    """Filler is left out, predicated or not; everything else counts, the branch too."""
    code = read(
        "UTMALDG.2D [UR8], [UR4]",
        "UTMALDG.2D [UR8], [UR6]",
        ".L_k:",
        "LDSM.16.M88.4 R4, [R2]",
        QMMA,
        FILLER,
        f"@!UPT {FILLER}",
        QMMA,
        "UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ",
        QMMA,
        QMMA,
        "@P0 BRA `(.L_k)",
        "FMUL R8, R8, R20",
    )
    assert (code.loop_mma, code.loop_others) == (4, 3)
    assert code.others_per_mma == 0.75
    assert code.tma_loads == 2
    assert code.mma == ("QMMA.SF.16832.F32.E4M3.E4M3.E8",)
    assert (code.registers, code.stack, code.local, code.spills) == (64, 0, 0, 0)


def test_every_kind_of_tensor_core_instruction_is_named_once(read: Callable[..., Code]) -> None:
    """Also outside the main loop."""
    code = read(".L_k:", QMMA, QMMA, "@P0 BRA `(.L_k)", PLAIN, "HMMA.16816.F32 R0, R4, R2, R0")
    assert code.mma == (
        "HMMA.16816.F32",
        "QMMA.16832.F32.E4M3.E4M3",
        "QMMA.SF.16832.F32.E4M3.E4M3.E8",
    )
    assert code.loop_mma == 2


def test_code_without_tensor_cores(read: Callable[..., Code]) -> None:
    code = read("FMUL R8, R8, R20", "EXIT")
    assert (code.mma, code.loop_mma, code.loop_others) == ((), 0, 0)
    assert code.others_per_mma == float("inf")


@pytest.mark.parametrize(
    ("line", "spills"),
    [
        ("STL.64 [R1], R8", 1),
        ("LDL R8, [R1+0x10]", 1),
        ("@P0 LDL.128 R8, [R1+0x10]", 1),
        ("STS [R1], R8", 0),
        ("LDG.E R8, desc[UR4][R2.64]", 0),
    ],
)
def test_spills(line: str, spills: int, read: Callable[..., Code]) -> None:
    assert read(QMMA, line, "EXIT").spills == spills


def test_resources(read: Callable[..., Code]) -> None:
    code = read(QMMA, resources="REG:217 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:1 TEXTURE:0")
    assert (code.registers, code.stack, code.local) == (217, 16, 8)


# ---------------------------------------------------------------------------- errors


def test_a_cubin_without_a_kernel(read: Callable[..., Code]) -> None:
    with pytest.raises(RuntimeError, match=r"no resource usage of kernel\.cubin, must be a cubin"):
        read("EXIT", resources="")


def test_what_is_no_cubin(tmp_path: Path) -> None:
    path = tmp_path / "x.cubin"
    path.write_bytes(b"no cubin")
    with pytest.raises(RuntimeError, match=r"^nvdisasm: got exit status \d+ \(.*\), must be 0$"):
        read_cubin(path)


def test_a_missing_tool() -> None:
    with pytest.raises(RuntimeError) as caught:
        sass.find_tool("no-such-tool")
    message = "no-such-tool: got nothing on PATH, must be installed: pip install 'cute-fp8[cli]'"
    assert str(caught.value) == message
