"""What the tests of the cache share: keys, a kernel to compile, and something that acts as one."""

from __future__ import annotations

from pathlib import Path

from cute_fp8.build.cache_key import Key
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig
from cute_fp8.kernels.tiles import TILE_64x64

ROOT = Path(__file__).resolve().parents[2]
SMALL = GemmConfig(TILE_64x64, EpilogueConfig())
KEY, OTHER = Key(b'{"kernel": "a"}'), Key(b'{"kernel": "b"}')


class Fake:
    """What the DSL returns, as far as the cache looks: something that exports itself."""

    def __init__(self, content: bytes = b"object"):
        self.content = content

    def export_to_c(self, path: str, function_name: str) -> None:
        Path(path).write_bytes(self.content)

    def __tvm_ffi_object__(self) -> None:
        return None


def load_fake(path: Path) -> str:
    """In place of the DSL's loader."""
    content = path.read_bytes().partition(b"\n")[0]
    assert content.startswith(b"object"), "what is not whole never gets here"
    return content.decode()


def names(folder: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{suffix}"))
