# SPDX-License-Identifier: Apache-2.0
"""Whole models that transformers has a class for: the encoder and the decoder of each, and its keys of config.json.

Used by config_json.py, directory_config.py and export.py. Any other combination is exported as MindVL, with its own code.
"""

from dataclasses import dataclass

from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """A model_type of transformers."""

    architecture: str  # class of the model
    vision: str  # kind of the vision encoder
    family: str  # of the decoder
    vision_model_types: tuple[str, ...]  # of vision_config, the one that is written first
    nested: bool  # whether config.json has the keys of the decoder in text_config; otherwise at the top level
    published_names: bool  # whether tensors are named visual.* and model.layers.*, as in published directories


WHOLE_MODELS: dict[str, WholeModel] = {
    "qwen2_5_vl": WholeModel(
        architecture="Qwen2_5_VLForConditionalGeneration",
        vision="qwen2_5_vl",
        family="qwen2",
        vision_model_types=("qwen2_5_vl", "qwen2_5_vl_vision"),
        nested=False,
        published_names=True,
    ),
    "qwen3_vl": WholeModel(
        architecture="Qwen3VLForConditionalGeneration",
        vision="qwen3_vl",
        family="qwen3_vl_text",
        vision_model_types=("qwen3_vl_vision", "qwen3_vl"),
        nested=True,
        published_names=False,
    ),
    "qwen3_vl_moe": WholeModel(
        architecture="Qwen3VLMoeForConditionalGeneration",
        vision="qwen3_vl",
        family="qwen3_vl_moe_text",
        vision_model_types=("qwen3_vl_moe_vision", "qwen3_vl_moe"),
        nested=True,
        published_names=False,
    ),
}


def whole_model(config: MindVLConfig) -> str | None:
    """The model_type of transformers for a model; None: it is exported as MindVL.

    Raises:
        ModelError: The decoder has M-RoPE, which only whole models have, and the model is none of them.
    """
    if config.language.rope.mrope_sections is None:
        return None
    for model_type, whole in WHOLE_MODELS.items():
        if whole.family == config.language.family:
            if whole.vision == config.vision.kind:
                return model_type
            raise ModelError(
                f"vision.kind: a model with a {whole.family} decoder can only be exported with the vision encoder "
                f"{whole.vision}, got {config.vision.kind}. Use another decoder, such as qwen3."
            )
    families = ", ".join(whole.family for whole in WHOLE_MODELS.values())
    raise ModelError(
        f"language.family: a {config.language.family} decoder with M-RoPE cannot be exported, only {families} can. Use one of "
        "these."
    )
