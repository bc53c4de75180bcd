# SPDX-License-Identifier: Apache-2.0
"""MindVL in vLLM: its vision encoder of Qwen2.5-VL, and its language model of the type that the directory names.

vLLM imports this file when vllm_plugin.py has registered it. Images, videos and weight names are handled as for
Qwen2.5-VL; positions of the language model are sequential, which vLLM uses where a configuration has no sections for
multimodal rotary embeddings. Tested with vLLM 0.32.
"""

from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import qwen2_5_vl
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY

from mindvl_model.hf.processing_mindvl import MindVLProcessor

VISION_MODEL_TYPE = "qwen2_5_vl_vision"
VISION_ROTARY_BASE = 10000.0  # a constant in vLLM's vision encoder


class MindVLProcessingInfo(qwen2_5_vl.Qwen2_5_VLProcessingInfo):
    """Size limits and counts of images and videos, from the configuration and the processor of the directory."""

    def get_hf_config(self) -> Any:
        return self.ctx.get_hf_config()

    def get_hf_processor(self, **kwargs: object) -> Any:
        return self.ctx.get_hf_processor(MindVLProcessor, **kwargs)


@MULTIMODAL_REGISTRY.register_processor(
    qwen2_5_vl.Qwen2_5_VLMultiModalProcessor,
    info=MindVLProcessingInfo,
    dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder,
)
class MindVLForConditionalGeneration(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL with another language model.

    Raises:
        ValueError: vLLM's vision encoder cannot represent that of the directory.
    """

    supports_mm_device_do_normalize = False  # the processor normalizes, in every version of vLLM

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)  # the base class would build its own language model
        model = vllm_config.model_config
        config: Any = model.hf_config  # a MindVLConfig, where the base class has a Qwen2_5_VLConfig
        multimodal = model.get_multimodal_config()
        _check(config, multimodal.is_multimodal_pruning_enabled())
        self.config, self.model_config, self.vllm_config = config, model, vllm_config
        self.multimodal_config = multimodal
        self.use_data_parallel = multimodal.mm_encoder_tp_mode == "data"
        self.video_pruning_rate, self.is_multimodal_pruning_enabled = None, False
        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.visual = qwen2_5_vl.Qwen2_5_VisionTransformer(
                config.vision_config,
                quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, "visual"),
            )
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config, hf_config=config.text_config, prefix=maybe_prefix(prefix, "language_model")
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors


def _check(config: Any, has_pruning: bool) -> None:
    vision, instead = config.vision_config, "Start vLLM with --model-impl transformers --trust-remote-code."
    if vision.model_type != VISION_MODEL_TYPE:
        raise ValueError(
            f"config.json: vision_config.model_type: the vLLM plugin of mindvl-model supports {VISION_MODEL_TYPE}, got "
            f"{vision.model_type}. {instead}"
        )
    base = float((getattr(vision, "rope_parameters", None) or {}).get("rope_theta", VISION_ROTARY_BASE))
    if base != VISION_ROTARY_BASE:
        raise ValueError(
            f"config.json: vision_config.rope_parameters.rope_theta: vLLM supports {VISION_ROTARY_BASE}, got {base}. {instead}"
        )
    if has_pruning:
        raise ValueError(
            "--video-pruning-rate: needs positions in three dimensions, which MindVL does not have. Remove the option."
        )
