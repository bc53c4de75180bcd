# SPDX-License-Identifier: Apache-2.0
"""Operators for packed multimodal training: contracts, plain PyTorch references, fast twins."""

from . import torch_backend as torch_backend
from .adamw import AdamW
from .attention import attention
from .backend import BackendRow, backend_table, select_backends, use_backend
from .config import OpsConfig
from .cross_entropy import cross_entropy
from .errors import OpsError, UnknownBackend
from .norm import rms_norm
from .patch_embed import conv_weight_to_matmul, matmul_weight_to_conv, patch_embed
from .rope import rotary
from .segments import Segments
from .swiglu import swiglu

__all__ = [
    "AdamW",
    "BackendRow",
    "OpsConfig",
    "OpsError",
    "Segments",
    "UnknownBackend",
    "attention",
    "backend_table",
    "conv_weight_to_matmul",
    "cross_entropy",
    "matmul_weight_to_conv",
    "patch_embed",
    "rms_norm",
    "rotary",
    "select_backends",
    "swiglu",
    "use_backend",
]
