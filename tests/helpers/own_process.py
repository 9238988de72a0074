"""A Python of its own, for what has to be seen from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cute_fp8


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which finds the package where this one did."""
    path = os.pathsep.join([str(Path(cute_fp8.__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
