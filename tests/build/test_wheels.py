"""Mixed installations of the DSL, in made-up site-packages folders."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from cute_fp8.build import wheels
from cute_fp8.build.wheels import FAMILY, Wheels, check, repair_command

BASE, CORE = f"{FAMILY}-libs-base", f"{FAMILY}-libs-core"
CU12, CU13 = f"{FAMILY}-libs-cu12", f"{FAMILY}-libs-cu13"
PACKAGE = "nvidia_cutlass_dsl/dsl_packages/cutlass"
IR = f"{PACKAGE}/_mlir/_cutlass_ir"


def install(site: Path, name: str, files: dict[str, str], version: str = "4.8.1") -> None:
    """What pip does with a wheel: files over whatever is there, and a RECORD."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {**files, f"{info}/METADATA": f"Name: {name}\nVersion: {version}\n"}
    record = []
    for path, text in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        record.append(f"{path},sha256={digest.decode().rstrip('=')},{len(text.encode())}")
    record += [f"{PACKAGE}/__pycache__/x.cpython-311.pyc,,", f"{info}/RECORD,,"]
    (site / info / "RECORD").write_text("\n".join(record), encoding="utf-8")


def sound(site: Path) -> None:
    """As 4.8 is: every distribution has paths of its own."""
    install(site, FAMILY, {"nvidia_cutlass_dsl_packages.pth": "import x"})
    install(site, CORE, {f"{PACKAGE}/__init__.py": "core"})
    install(site, BASE, {f"{PACKAGE}/ops.py": "base", "../../../bin/run-iket": "script"})
    install(site, CU12, {f"{IR}.cu12.so": "twelve"})


def look(site: Path) -> Wheels:
    return check([str(site)])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "lib" / "python3" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def test_a_sound_installation(site: Path) -> None:
    sound(site)
    found = look(site)
    assert found.faults == () and found.repair is None
    assert found.versions == dict.fromkeys(sorted((FAMILY, BASE, CORE, CU12)), "4.8.1")
    assert str(found) == "ok: every file is its wheel's (libs-base, libs-core, libs-cu12)"


def test_both_flavours_of_4_8_live_side_by_side(site: Path) -> None:
    """What ``nvidia-cutlass-dsl[cu13]`` installs: no fault."""
    sound(site)
    install(site, CU13, {f"{IR}.cu13.so": "thirteen"})
    assert look(site).faults == ()


def test_nothing_installed(site: Path) -> None:
    found = look(site)
    assert (found.versions, found.faults, str(found)) == ({}, (), "not installed")


@pytest.mark.parametrize("last", [BASE, CU13])
def test_two_wheels_write_one_path(site: Path, last: str) -> None:
    """The order of installation decides; whoever lost is named, and the way out."""
    contents = {BASE: "for CUDA 12, base's", CU13: "for CUDA 13"}
    install(site, FAMILY, {})
    for name in sorted(contents, key=lambda name: name == last):
        install(site, name, {f"{IR}.so": contents[name], f"{PACKAGE}/same.py": "same"})
    found = look(site)
    assert found.faults == (
        f"{IR}.so: claimed by libs-base and libs-cu13, and is what "
        f"{last.removeprefix(FAMILY)[1:]} has",
    )
    assert found.repair == (
        f"python -m pip uninstall -y {FAMILY} {BASE} {CU13} && "
        "python -m pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'"
    )
    assert str(found).splitlines() == [
        "mixed or damaged (libs-base, libs-cu13):",
        f"  {found.faults[0]}",
        f"mend it with: {found.repair}",
    ]


def test_the_same_size_is_not_the_same_content(site: Path) -> None:
    sound(site)
    (site / f"{IR}.cu12.so").write_text("twelvE")
    assert look(site).faults == (f"{IR}.cu12.so: not what the wheel of libs-cu12 has",)
    (site / f"{IR}.cu12.so").write_text("longer than twelve")
    assert look(site).faults == (f"{IR}.cu12.so: not what the wheel of libs-cu12 has",)


def test_neither_of_two_claims_is_true(site: Path) -> None:
    install(site, BASE, {f"{IR}.so": "a"})
    install(site, CU13, {f"{IR}.so": "b"})
    (site / f"{IR}.so").write_text("c")
    assert look(site).faults == (
        f"{IR}.so: claimed by libs-base and libs-cu13, and is what neither has",
    )


def test_removing_one_wheel_took_a_file_of_another(site: Path) -> None:
    sound(site)
    (site / PACKAGE / "ops.py").unlink()
    found = look(site)
    assert found.faults == (f"{PACKAGE}/ops.py: missing, belongs to libs-base",)
    assert found.repair is not None and "'nvidia-cutlass-dsl>=4.8,<4.9'" in found.repair


def test_versions_that_differ(site: Path) -> None:
    sound(site)
    install(site, CU13, {f"{IR}.cu13.so": "thirteen"}, version="4.4.0")
    (fault,) = look(site).faults
    assert fault.startswith("versions differ: ") and "libs-cu13 4.4.0" in fault


def test_long_lists_are_cut(site: Path) -> None:
    install(site, BASE, {f"{PACKAGE}/m{i}.py": str(i) for i in range(wheels.SHOWN + 7)})
    for file in (site / PACKAGE).glob("*.py"):
        file.unlink()
    found = look(site)
    assert len(found.faults) == wheels.SHOWN + 7
    assert len(str(found).splitlines()) == wheels.SHOWN + 3
    assert "\n  and 7 more\n" in str(found)


def test_the_copy_that_python_imports_is_the_one_that_counts(site: Path, tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    sound(site)
    install(behind, CORE, {f"{PACKAGE}/__init__.py": "core"}, version="4.4.0")
    (behind / PACKAGE / "__init__.py").unlink()
    assert check([str(site), str(behind)]).faults == ()


def test_other_distributions_and_spellings(site: Path) -> None:
    install(site, "numpy", {"numpy/__init__.py": "numpy"})
    (site / "numpy" / "__init__.py").unlink()
    install(site, "NVIDIA_Cutlass.DSL_libs-core", {f"{PACKAGE}/a.py": "a"})
    found = look(site)
    assert (found.versions, found.faults) == ({CORE: "4.8.1"}, ())


def test_the_repair_names_the_flavour_that_was_wanted() -> None:
    assert repair_command([CU12]).endswith("'nvidia-cutlass-dsl>=4.8,<4.9'")
    assert repair_command([CU12, CU13]).endswith("'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'")
    assert "\n" not in repair_command([CU12, CU13])


def test_the_range_is_the_package_metadata_s() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{FAMILY}{wheels.SUPPORTED}"' in project
    assert f'"{FAMILY}[cu13]{wheels.SUPPORTED}"' in project


def test_this_installation_can_be_checked() -> None:
    found = check()
    assert all(name.startswith(FAMILY) for name in found.versions)
    assert (found.repair is None) == (found.faults == ())
