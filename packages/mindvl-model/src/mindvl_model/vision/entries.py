# SPDX-License-Identifier: Apache-2.0
"""The entries of the registry of vision encoders by the `kind` of VisionConfig."""

from mindvl_model.vision.qwen2_5_vl import QWEN2_5_VL
from mindvl_model.vision.qwen3_vl import QWEN3_VL
from mindvl_model.vision.registry import VisionEntry

DEFAULT_KIND = "qwen2_5_vl"  # of configurations that were written before there was a second encoder

VISION_ENTRIES: dict[str, VisionEntry] = {
    DEFAULT_KIND: QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
}
