# SPDX-License-Identifier: Apache-2.0
"""Write a model as a folder that plain transformers loads, and read such folders.

Comes after training; what merge, evaluation and serving start from. The folder carries configuration, weights,
tokenizer, processor and the three files of remote code.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig, TokenConfig, VisionConfig
from mindvl_model.errors import ModelError, WeightError
from mindvl_model.language_config import Qwen3LanguageConfig
from mindvl_model.parameters import PARTS, Part, named_tensors, parameter_group
from mindvl_model.weights.folder import WeightFolder, as_dtype, sync_folder, write_weights
from mindvl_model.weights.names import WeightRule, canonical_name, weight_rules
from mindvl_ops import OpsError

REMOTE_CODE = ("configuration_mindvl.py", "modeling_mindvl.py", "processing_mindvl.py")


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings:
    """How pictures are brought to size when the exported model is used."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of every tensor of a folder."""

    loaded: tuple[str, ...]  # parameters of the model that were filled
    unused: tuple[str, ...]  # tensors of the folder that no requested parameter takes


def export_hf_folder(
    model: torch.nn.Module,
    config: MindVLConfig,
    out: Path,
    *,
    tokenizer: Path,
    processor: ProcessorSettings,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a whole model (one process, no layout) as a transformers folder; the folder appears whole or not at all.

    Args:
        tokenizer: A folder with a transformers tokenizer and its chat template.
        dtype: Type of the written weights; the model's own when None.

    Raises:
        ModelError: `out` exists already, or there is no tokenizer in its folder.
    """
    if out.exists():
        raise ModelError(f"{out}: exists already. Name a new folder or remove it first.")
    if not (tokenizer / "tokenizer_config.json").is_file():
        raise ModelError(f"{tokenizer}: no tokenizer here. Name the folder of the run's tokenizer (--tokenizer).")
    parameters = named_tensors(model)
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)

    def tensors() -> Iterable[tuple[str, Tensor]]:
        for rule in weight_rules(config):
            pieces = rule.split(parameters[rule.param_name].detach())
            yield from zip(rule.hf_names, (as_dtype(piece, dtype) for piece in pieces), strict=True)

    write_weights(unfinished, tensors())
    _write_processor(unfinished, tokenizer, processor, config.vision)
    stored = dtype or next(iter(parameters.values())).dtype
    config_text = json.dumps(hf_config(config, stored), indent=2, sort_keys=True)
    (unfinished / "config.json").write_text(config_text + "\n")
    generation = {"eos_token_id": config.tokens.end_of_turn, "pad_token_id": config.tokens.pad, "do_sample": False}
    (unfinished / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
    for name in REMOTE_CODE:
        shutil.copyfile(Path(__file__).with_name(name), unfinished / name)
    sync_folder(unfinished)
    os.replace(unfinished, out)


@torch.no_grad()
def load_hf_folder(
    model: torch.nn.Module, config: MindVLConfig, path: Path, parts: Iterable[Part] = PARTS
) -> LoadReport:
    """Fill parts of a whole model from a transformers folder: MindVL, Qwen2.5-VL (vision) or Qwen3 (language).

    Raises:
        WeightError: A tensor is missing, damaged or of another shape than the model's.
    """
    folder = WeightFolder(path)
    stored = {canonical_name(name, folder.model_type): name for name in folder.names()}
    parameters, wanted = named_tensors(model), set(parts)
    loaded: list[str] = []
    used: set[str] = set()
    for rule in weight_rules(config):
        if parameter_group(rule.param_name) not in wanted:
            continue
        missing = [name for name in rule.hf_names if name not in stored]
        if missing:
            raise WeightError(
                f"{path}: no tensor {missing[0]!r}, which {rule.param_name} needs. "
                "Name a folder of this family and size, or leave this part out."
            )
        tensor = _join(rule, [folder.read(stored[name]) for name in rule.hf_names], path)
        parameter = parameters[rule.param_name]
        if tensor.shape != parameter.shape:
            raise WeightError(
                f"{path}: {rule.hf_names[0]} makes {rule.param_name} of shape {list(tensor.shape)}, but the model has "
                f"{list(parameter.shape)}. Use the configuration that belongs to these weights."
            )
        parameter.copy_(tensor)
        loaded.append(rule.param_name)
        used.update(rule.hf_names)
    unused = tuple(sorted(stored[name] for name in set(stored) - used))
    return LoadReport(loaded=tuple(loaded), unused=unused)


def hf_config(config: MindVLConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of an exported model."""
    vision, language, tokens = config.vision, config.language, config.tokens
    assert isinstance(language, Qwen3LanguageConfig)
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
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "hidden_size": vision.hidden_size,
            "depth": vision.num_layers,
            "num_heads": vision.num_heads,
            "intermediate_size": vision.ffn_hidden_size,
            "fullatt_block_indexes": list(vision.full_attention_layers),
            "window_size": vision.window_size,
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "in_channels": vision.in_channels,
            "out_hidden_size": language.hidden_size,
            "initializer_range": vision.init_std or 0.02,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rotary_base},
        },
        "text_config": {
            "model_type": "qwen3",
            "vocab_size": language.vocab_size,
            "hidden_size": language.hidden_size,
            "intermediate_size": language.ffn_hidden_size,
            "num_hidden_layers": language.num_layers,
            "num_attention_heads": language.num_heads,
            "num_key_value_heads": language.num_kv_heads,
            "head_dim": language.head_dim,
            "max_position_embeddings": language.max_positions,
            "rms_norm_eps": language.norm_epsilon,
            "tie_word_embeddings": language.tie_embeddings,
            "initializer_range": language.init_std or 0.02,
            "rope_parameters": {"rope_type": "default", "rope_theta": language.rotary_base},
            "eos_token_id": tokens.end_of_turn,
            "pad_token_id": tokens.pad,
        },
    }


def config_from_folder(path: Path) -> MindVLConfig:
    """The configuration of an exported MindVL folder.

    Raises:
        WeightError: The folder is not one, or a value is missing.
    """
    file = path / "config.json"
    try:
        stored = json.loads(file.read_text())
        vision, text = stored["vision_config"], stored["text_config"]
        return MindVLConfig(
            vision=VisionConfig(
                hidden_size=vision["hidden_size"],
                num_layers=vision["depth"],
                num_heads=vision["num_heads"],
                ffn_hidden_size=vision["intermediate_size"],
                full_attention_layers=tuple(vision["fullatt_block_indexes"]),
                window_size=vision["window_size"],
                patch_size=vision["patch_size"],
                temporal_patch_size=vision["temporal_patch_size"],
                spatial_merge_size=vision["spatial_merge_size"],
                in_channels=vision["in_channels"],
                rotary_base=vision["rope_parameters"]["rope_theta"],
                init_std=vision["initializer_range"],
            ),
            language=Qwen3LanguageConfig(
                hidden_size=text["hidden_size"],
                num_layers=text["num_hidden_layers"],
                num_heads=text["num_attention_heads"],
                num_kv_heads=text["num_key_value_heads"],
                head_dim=text["head_dim"],
                ffn_hidden_size=text["intermediate_size"],
                vocab_size=text["vocab_size"],
                tie_embeddings=text["tie_word_embeddings"],
                rotary_base=text["rope_parameters"]["rope_theta"],
                norm_epsilon=text["rms_norm_eps"],
                max_positions=text["max_position_embeddings"],
                init_std=text["initializer_range"],
            ),
            tokens=TokenConfig(
                image=stored["image_token_id"],
                vision_start=stored["vision_start_token_id"],
                vision_end=stored["vision_end_token_id"],
                end_of_turn=stored["eos_token_id"],
                pad=stored["pad_token_id"],
                video=stored.get("video_token_id"),
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{file}: not the configuration of an exported MindVL model ({error!r}).") from error


def _join(rule: WeightRule, tensors: list[Tensor], path: Path) -> Tensor:
    try:
        return rule.join(tensors)
    except (RuntimeError, ValueError, OpsError, WeightError) as error:
        shapes = " and ".join(f"{name} {list(one.shape)}" for name, one in zip(rule.hf_names, tensors, strict=True))
        raise WeightError(
            f"{path}: {shapes} cannot make {rule.param_name} ({error}). "
            "Use the configuration that belongs to these weights."
        ) from error


def _write_processor(folder: Path, tokenizer: Path, settings: ProcessorSettings, vision: VisionConfig) -> None:
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

    from mindvl_model.hf.processing_mindvl import MindVLProcessor

    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        image_mean=list(vision.image_mean),
        image_std=list(vision.image_std),
    )
    text = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    MindVLProcessor(images, text, chat_template=text.chat_template).save_pretrained(folder)
    file = folder / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["auto_map"] = {"AutoProcessor": "processing_mindvl.MindVLProcessor"}
    file.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
