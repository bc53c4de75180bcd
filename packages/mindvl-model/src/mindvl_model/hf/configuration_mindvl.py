# SPDX-License-Identifier: Apache-2.0
"""Configuration of an exported MindVL model for transformers, written next to the weights as remote code.

Imports only transformers, so that the directory can be used without mindvl.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig, Qwen2_5_VLConfig, Qwen3VLConfig

DEFAULT_ENCODER = "qwen2_5_vl_vision"
VISION_CONFIGS = {  # by model_type of vision_config
    DEFAULT_ENCODER: Qwen2_5_VLConfig.sub_configs["vision_config"],
    "qwen3_vl_vision": Qwen3VLConfig.sub_configs["vision_config"],
}


class MindVLConfig(PreTrainedConfig):
    """Configurations of a vision encoder and a language model, and the special token ids.

    The encoder is that of Qwen2.5-VL or Qwen3-VL, the language model for example Qwen3, each selected by its model_type.
    """

    model_type = "mindvl"
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012

    def __init__(
        self,
        vision_config: Any = None,
        text_config: Any = None,
        image_token_id: int = 151655,
        video_token_id: int | None = None,
        vision_start_token_id: int = 151652,
        vision_end_token_id: int = 151653,
        **kwargs: Any,
    ) -> None:
        self.vision_config = vision_config
        if not isinstance(vision_config, PreTrainedConfig):
            given = dict(vision_config or {})
            self.vision_config = VISION_CONFIGS[given.get("model_type", DEFAULT_ENCODER)](**given)
        self.text_config = text_config
        if not isinstance(text_config, PreTrainedConfig):
            self.text_config = AutoConfig.for_model(**({"model_type": "qwen3"} | (text_config or {})))
        self.image_token_id = image_token_id
        self.video_token_id = video_token_id
        self.vision_start_token_id = vision_start_token_id
        self.vision_end_token_id = vision_end_token_id
        kwargs.setdefault("tie_word_embeddings", self.text_config.tie_word_embeddings)
        super().__init__(**kwargs)
