# SPDX-License-Identifier: Apache-2.0
"""Operators for packed multimodal training: contracts, plain PyTorch references, fast implementations."""

from . import torch_backend as torch_backend
from .adamw import AdamW
from .angles import mrope_tables, rotary_tables, vision_tables
from .attention import attention
from .backend import BackendRow, backend_table, select_backends, use_backend
from .check import CheckRow, check_operators, table_text
from .config import OpsConfig, RuntimeConfig
from .cross_entropy import cross_entropy, linear_cross_entropy
from .errors import OpsError, UnknownBackend
from .grouped_matmul import grouped_matmul
from .masked_softmax import scaled_masked_softmax
from .moe_gating import moe_gating, updated_expert_bias
from .moe_permute import moe_permute, moe_permute_map, moe_unpermute, moe_unpermute_map
from .norm import add_rms_norm, rms_norm
from .npu import kernels as kernels
from .patch_embed import conv_as_matmul, conv_weight_to_matmul, matmul_weight_to_conv, patch_embed
from .rope import rotary
from .rotary_qkv import HeadNorms, rotary_qkv
from .segments import Segments
from .staging import to_device
from .swiglu import swiglu
from .triton_backend import elementwise as elementwise
from .vocabulary import VocabularyShard

__all__ = [
    "AdamW",
    "BackendRow",
    "CheckRow",
    "HeadNorms",
    "OpsConfig",
    "OpsError",
    "RuntimeConfig",
    "Segments",
    "UnknownBackend",
    "VocabularyShard",
    "add_rms_norm",
    "attention",
    "backend_table",
    "check_operators",
    "conv_as_matmul",
    "conv_weight_to_matmul",
    "cross_entropy",
    "grouped_matmul",
    "linear_cross_entropy",
    "matmul_weight_to_conv",
    "moe_gating",
    "moe_permute",
    "moe_permute_map",
    "moe_unpermute",
    "moe_unpermute_map",
    "mrope_tables",
    "patch_embed",
    "rms_norm",
    "rotary",
    "rotary_qkv",
    "rotary_tables",
    "scaled_masked_softmax",
    "select_backends",
    "swiglu",
    "table_text",
    "to_device",
    "updated_expert_bias",
    "use_backend",
    "vision_tables",
]
