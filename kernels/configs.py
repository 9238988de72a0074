"""The configurations of all kernels, as types."""

from __future__ import annotations

from .config import GemmConfig, RelayoutConfig
from .config_sm90 import HopperConfig
from .mlp_config import MlpConfig
from .projection_config import ProjectionConfig
from .rope_config import RopeConfig
from .row_config import RowConfig

#: Any GEMM kernel's; those of kernels that are no GEMM and no producer; any kernel's.
AnyGemm = GemmConfig | HopperConfig
FusedConfig = MlpConfig | ProjectionConfig | RopeConfig
Config = AnyGemm | RelayoutConfig | RowConfig | FusedConfig
