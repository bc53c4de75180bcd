# SPDX-License-Identifier: Apache-2.0
"""Write config.json of a transformers directory from a MindVLConfig: as a whole model of transformers, or as MindVL.

Runs before the weights are written; directory_config.py reads the file back.
"""

from typing import Any

import torch

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.errors import ModelError
from mindvl_model.families.registry import write_language
from mindvl_model.hf.vision_json import write_vision
from mindvl_model.hf.whole_models import WHOLE_MODELS, WholeModel, whole_model

TOKENS_PER_SECOND = 2  # as in the published Qwen2.5-VL directories and in mindvl_data.positions
VISION_NORM_EPSILON = 1e-6  # a constant in the code of transformers, not a key of its configuration


def hf_config(config: MindVLConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of an exported model: that of transformers for its whole models, otherwise MindVL's.

    Raises:
        ModelError: The transformers configuration cannot represent the model.
    """
    if config.vision.norm_epsilon != VISION_NORM_EPSILON:
        raise ModelError(
            f"vision.norm_epsilon: a model can only be exported with {VISION_NORM_EPSILON}, which transformers uses, got "
            f"{config.vision.norm_epsilon}. Train with this value."
        )
    model_type = whole_model(config)
    if model_type is None:
        return _mindvl(config, dtype)
    whole = WHOLE_MODELS[model_type]
    return _nested(config, dtype, model_type, whole) if whole.nested else _qwen2_5_vl(config, dtype)


def _mindvl(config: MindVLConfig, dtype: torch.dtype) -> dict[str, Any]:
    tokens, language = config.tokens, config.language
    return {
        "model_type": "mindvl",
        "architectures": ["MindVLForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_mindvl.MindVLConfig",
            "AutoModel": "modeling_mindvl.MindVLModel",
            "AutoModelForImageTextToText": "modeling_mindvl.MindVLForConditionalGeneration",
        },
        "dtype": str(dtype).removeprefix("torch."),
        "image_token_id": tokens.image,
        "video_token_id": tokens.video,
        "vision_start_token_id": tokens.vision_start,
        "vision_end_token_id": tokens.vision_end,
        "eos_token_id": tokens.end_of_turn,
        "pad_token_id": tokens.pad,
        "tie_word_embeddings": language.tie_embeddings,
        "vision_config": write_vision(config.vision, language.hidden_size)
        | {
            "model_type": config.vision.entry.published.model_type,
            "initializer_range": config.vision.init_std or 0.02,
            "rope_parameters": {"rope_type": "axial", "rope_theta": config.vision.rotary_base},
        },
        "text_config": write_language(language) | {"eos_token_id": tokens.end_of_turn, "pad_token_id": tokens.pad},
    }


def _nested(config: MindVLConfig, dtype: torch.dtype, model_type: str, whole: WholeModel) -> dict[str, Any]:
    """The form with a section for each part."""
    tokens, vision = config.tokens, config.vision
    _check_rotary_base(vision)
    return {
        "model_type": model_type,
        "architectures": [whole.architecture],
        "image_token_id": tokens.image,
        "video_token_id": tokens.video,
        "vision_start_token_id": tokens.vision_start,
        "vision_end_token_id": tokens.vision_end,
        "tie_word_embeddings": config.language.tie_embeddings,
        "text_config": write_language(config.language)
        | {
            "bos_token_id": tokens.pad,
            "eos_token_id": tokens.end_of_turn,
            "pad_token_id": tokens.pad,
            "dtype": str(dtype).removeprefix("torch."),
            "use_cache": True,
        },
        "vision_config": write_vision(vision, config.language.hidden_size)
        | {key: values[0] for key, values in vision.entry.published.only.items()}
        | {"model_type": whole.vision_model_types[0], "initializer_range": vision.init_std or 0.02},
    }


def _check_rotary_base(vision: VisionConfig) -> None:
    if vision.rotary_base != VisionConfig.rotary_base:
        raise ModelError(
            f"vision.rotary_base: a {vision.entry.title} model can only be exported with {VisionConfig.rotary_base}, got "
            f"{vision.rotary_base}. Train with this value."
        )


def _qwen2_5_vl(config: MindVLConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The form of the published directories: the keys of the decoder at the top level."""
    tokens, vision = config.tokens, config.vision
    _check_rotary_base(vision)
    return write_language(config.language) | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "bos_token_id": tokens.pad,
        "eos_token_id": tokens.end_of_turn,
        "pad_token_id": tokens.pad,
        "image_token_id": tokens.image,
        "video_token_id": tokens.video,
        "vision_start_token_id": tokens.vision_start,
        "vision_end_token_id": tokens.vision_end,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vision_config": write_vision(vision, config.language.hidden_size)
        | {
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "in_chans": vision.in_channels,
            "initializer_range": vision.init_std or 0.02,
            "spatial_patch_size": vision.patch_size,
            "tokens_per_second": TOKENS_PER_SECOND,
        },
    }
