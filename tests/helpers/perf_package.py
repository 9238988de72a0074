"""Makes ``perf`` importable, which is no package of an installation, without the root on
``sys.path``: there ``kernels`` would be importable too, under a name that is another package's.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_spec = ModuleSpec("perf", None, is_package=True)
_spec.submodule_search_locations = [str(Path(__file__).resolve().parents[2] / "perf")]
sys.modules.setdefault("perf", importlib.util.module_from_spec(_spec))
