"""The wheel holds what a checkout imports, and lives beside PyPI's package `kernels`.

Our folder `kernels/` shares its name with that package, which transformers imports. These tests
build the wheel from a copy of the sources, install it in a new environment that also sees the
packages of the running one, PyPI's `kernels` among them, and look at what is imported there.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import cute_fp8

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "cute_fp8", "kernels"]

# One worker builds the wheel for all of these (`pytest -n auto --dist loadgroup`).
pytestmark = pytest.mark.xdist_group("packaging")

# Imports both packages, and the part of transformers that imports `kernels` in its turn.
PROBE = """\
import os
import sys

import cute_fp8.kernels.config
import kernels
import transformers.activations


def test_kernels():
    assert sys.path[0] in ("", os.getcwd()), sys.path
    assert callable(kernels.get_kernel)


if __name__ == "__main__":
    test_kernels()
    print(cute_fp8.__file__, cute_fp8.kernels.config.__file__, kernels.__file__)
"""


def modules() -> list[str]:
    """The files of all modules of the package, named as in the wheel."""
    host = [path.relative_to(ROOT) for path in (ROOT / "cute_fp8").rglob("*.py")]
    device = ["cute_fp8" / path.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*.py")]
    # A set, should a Python's rglob follow the symlink between the two.
    return sorted({path.as_posix() for path in host + device})


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that must succeed, and that sees no PYTHONPATH of ours."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def need(*distributions: str) -> None:
    """Skip where one of these is not installed; CI has them all."""
    installed = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    if missing := sorted(set(distributions) - installed):
        message = f"{', '.join(missing)} not installed; `make venv` does it"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist as a release is, without touching the checkout."""
    need("build", "setuptools")
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has the wheel and, behind it, what we have."""
    need("kernels", "transformers")
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Plain paths: the .pth files in those folders, our editable install's too, are not read again.
    behind = [path for path in sys.path if "-packages" in path and Path(path).is_dir()]
    (site / "behind.pth").write_text("\n".join(behind))
    (site / "probe.py").write_text(PROBE)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=home)
    return python


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"cute_fp8-{cute_fp8.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"cute_fp8", metadata}
    assert sorted(name for name in names if name.endswith(".py")) == modules()


def test_every_module_comes_from_the_wheel(python: Path, tmp_path: Path) -> None:
    names = [name[:-3].replace("/", ".").removesuffix(".__init__") for name in modules()]
    # Found, not imported: some modules need a GPU's libraries.
    code = "import importlib.util as u, sys; print(*[u.find_spec(n).origin for n in sys.argv[1:]])"
    origins = run(python, "-c", code, *names, cwd=tmp_path).split()
    assert len(origins) == len(names)
    assert all(Path(origin).is_relative_to(python.parents[1]) for origin in origins), origins


def test_the_wheel_and_the_other_kernels_import_together(python: Path, tmp_path: Path) -> None:
    host, device, other = run(python, "-m", "probe", cwd=tmp_path).split()
    assert Path(host).is_relative_to(python.parents[1])
    assert Path(device).is_relative_to(python.parents[1])
    assert not Path(other).is_relative_to(ROOT / "kernels")
    assert (python.parent / "cute-fp8").is_file()


@pytest.mark.parametrize("how", ["-c", "-m", "pytest"])
def test_the_repository_root_does_not_shadow_the_other_kernels(how: str, python: Path) -> None:
    """Each way of running puts the working directory, the repository root, first on sys.path."""
    (probe,) = python.parents[1].glob("lib/python*/site-packages/probe.py")
    arguments = {
        "-c": ["-c", "import probe; probe.test_kernels()"],
        "-m": ["-m", "probe"],
        "pytest": ["-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", probe],
    }
    run(python, *arguments[how], cwd=ROOT)


def test_kernels_is_a_bare_folder_behind_a_symlink() -> None:
    assert (ROOT / "cute_fp8" / "kernels").readlink() == Path("../kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists(), "see the note in pyproject.toml"


def test_these_tests_see_no_kernels_of_ours() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or "-packages" in spec.origin
