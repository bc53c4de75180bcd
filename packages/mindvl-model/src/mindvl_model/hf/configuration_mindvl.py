# SPDX-License-Identifier: Apache-2.0
"""Configuration of an exported MindVL model for transformers; written beside the weights as remote code.

Imports transformers only, so that the folder works where mindvl is not installed.
"""

from typing import Any

from transformers import PreTrainedConfig, Qwen2_5_VLConfig, Qwen3Config

VisionConfig = Qwen2_5_VLConfig.sub_configs["vision_config"]


class MindVLConfig(PreTrainedConfig):
    """Vision tower of Qwen2.5-VL, language model of Qwen3, and the ids of the tokens that join them."""

    model_type = "mindvl"
    sub_configs = {"vision_config": VisionConfig, "text_config": Qwen3Config}  # noqa: RUF012

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
        self.vision_config = _as_config(VisionConfig, vision_config)
        self.text_config = _as_config(Qwen3Config, text_config)
        self.image_token_id = image_token_id
        self.video_token_id = video_token_id
        self.vision_start_token_id = vision_start_token_id
        self.vision_end_token_id = vision_end_token_id
        kwargs.setdefault("tie_word_embeddings", self.text_config.tie_word_embeddings)
        super().__init__(**kwargs)


def _as_config(cls: Any, value: Any) -> Any:
    return value if isinstance(value, cls) else cls(**(value or {}))
