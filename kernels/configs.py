"""The configurations of all kernels, as types."""

from __future__ import annotations

from .config import GemmConfig, RelayoutConfig
from .config_sm90 import HopperConfig
from .row_config import RowConfig

#: Any GEMM kernel's; any kernel's.
AnyGemm = GemmConfig | HopperConfig
Config = AnyGemm | RelayoutConfig | RowConfig
