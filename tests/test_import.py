"""What importing the package costs and touches, and what it exports."""

from __future__ import annotations

import pkgutil

import pytest
from own_process import python

import cute_fp8

#: Seconds that the package may take to import when torch is there already.
IMPORT_SECONDS = 0.2

TIMED_IMPORT = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import cute_fp8
seconds = time.perf_counter() - start
loaded = {".".join(name.split(".")[:2]) for name in sys.modules.keys() - before}
slow = {"cutlass", "cuda.bindings", "tvm_ffi", "triton"}
print(seconds, torch.cuda.is_initialized(), *loaded & slow)
"""

FORK = """
import os
import torch
import cute_fp8
torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
codes = torch.arange(64).remainder(7).to(torch.float8_e4m3fn).view(4, 16).repeat(2, 1)
ones = torch.ones(8)
expected = cute_fp8.gemm(codes, ones, codes, ones)
child = os.fork()
if child == 0:
    with cute_fp8.use(backend="reference"):
        same = torch.equal(cute_fp8.gemm(codes, ones, codes, ones), expected)
    os._exit(0 if same and not torch.cuda.is_initialized() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(expected.sum()))
"""


def test_import_is_quick_and_touches_neither_compiler_nor_gpu() -> None:
    """The best of three, for a busy machine."""
    seconds = []
    for _ in range(3):
        done = python("-c", TIMED_IMPORT)
        assert (done.returncode, done.stderr) == (0, "")
        taken, initialized, *loaded = done.stdout.split()
        assert initialized == "False"
        assert loaded == []
        seconds.append(float(taken))
        if seconds[-1] <= IMPORT_SECONDS:
            return
    pytest.fail(f"importing took {min(seconds):.3f} s beyond torch, must be <= {IMPORT_SECONDS}")


def test_works_after_a_fork() -> None:
    done = python("-c", FORK)
    assert done.stderr == ""
    status, total = map(int, done.stdout.split())
    assert status == 0
    assert total > 0


def test_everything_exported_is_there() -> None:
    assert len(set(cute_fp8.__all__)) == len(cute_fp8.__all__)  # their order is ruff's business
    for name in cute_fp8.__all__:
        assert getattr(cute_fp8, name) is not None


def test_no_module_has_a_public_name() -> None:
    """Importing it would put it in the place of what is public."""
    modules = {module.name for module in pkgutil.iter_modules(cute_fp8.__path__)}
    assert {"gemms", "rows"} <= modules and modules.isdisjoint(cute_fp8.__all__)
