# SPDX-License-Identifier: Apache-2.0
"""Our configuration from a transformers folder: MindVL, Qwen2.5-VL of any naming generation, Qwen3.

Comes before a model is built for a folder's weights. Every key of config.json must be known: taken, without effect on
what is computed, or of the only value we can compute; anything else is refused by name.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindvl_model.config import MindVLConfig, TokenConfig, VisionConfig
from mindvl_model.errors import ModelError, WeightError
from mindvl_model.hf.config_json import TOKENS_PER_SECOND
from mindvl_model.language_config import Qwen2LanguageConfig, Qwen3LanguageConfig

_NEEDED = object()
_BOOKKEEPING = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
}
_TRAINING_AND_OUTPUT = {
    "_attn_implementation_autoset",
    "chunk_size_feed_forward",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "use_cache",
}
_TOKENS = {  # read from the first section that has them
    "bos_token_id",
    "eos_token_id",
    "image_token_id",
    "pad_token_id",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
}
_OF_SLIDING_WINDOWS = {"max_window_layers", "sliding_window"}  # use_sliding_window itself is refused
_WITHOUT_EFFECT = _BOOKKEEPING | _TRAINING_AND_OUTPUT | _TOKENS | _OF_SLIDING_WINDOWS | {"spatial_patch_size"}
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),  # False and 0.0 are equal to 0
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "tokens_per_second": (TOKENS_PER_SECOND,),
}


class _Keys:
    """One section of a config.json, which knows which of its keys were asked for."""

    def __init__(self, values: Any, place: str) -> None:
        if not isinstance(values, dict):
            raise WeightError(f"{place}: not a section of keys but {values!r:.60}. Fetch the file again.")
        self.values, self.place = values, place
        self._asked: set[str] = set()

    def take(self, name: str, default: Any = _NEEDED) -> Any:
        self._asked.add(name)
        value = self.values.get(name, default)
        if value is _NEEDED:
            raise WeightError(f"{self.place}: {name} is missing. Fetch the file again, or name another folder.")
        return value

    def number(self, name: str, default: Any = _NEEDED, *, whole: bool = True) -> Any:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or value <= 0:
            raise WeightError(f"{self.place}: {name}={value!r:.60} is no positive number. Fetch the file again.")
        return value

    def section(self, name: str) -> "_Keys":
        return _Keys(self.take(name), f"{self.place}: {name}")

    def refuse_the_rest(self) -> None:
        """Every key that was not taken must be known to change nothing."""
        for name in sorted(set(self.values) - self._asked - _WITHOUT_EFFECT):
            value = self.values[name]
            if name == "layer_types" and isinstance(value, list) and set(value) <= {"full_attention"}:
                continue
            if name == "quantization_config" and isinstance(value, dict) and value.get("quant_method") == "fp8":
                continue  # WeightFolder gives such weights out as bfloat16
            if name not in _ONLY_VALUES:
                raise WeightError(
                    f"{self.place}: key {name!r} ({value!r:.60}) is not known to this version, so the model it "
                    "describes may compute something else. Remove the key if it changes nothing."
                )
            if value not in _ONLY_VALUES[name]:
                raise WeightError(
                    f"{self.place}: {name}={value!r:.60}, but only {_ONLY_VALUES[name][0]!r} is supported. "
                    "Name a folder of a model that has it."
                )


def config_from_folder(path: Path) -> MindVLConfig:
    """The configuration of a whole model: a MindVL or a Qwen2.5-VL folder.

    Raises:
        WeightError: The folder is another one, or config.json has a key or a value we do not know.
    """
    keys = _read(path)
    kind = keys.take("model_type", None)
    if kind not in ("mindvl", "qwen2_5_vl"):
        more = " It holds a language model alone: name it as init.language." if kind == "qwen3" else ""
        raise WeightError(f"{keys.place}: model_type={kind!r} is no MindVL or Qwen2.5-VL model.{more or ' Name one.'}")
    nested = kind == "mindvl" or keys.take("text_config", None) is not None
    text = keys.section("text_config") if nested else keys  # published folders have the decoder's keys at the top
    vision = keys.section("vision_config")
    try:
        config = MindVLConfig(
            vision=_vision(vision, path),
            language=_qwen3(text, keys) if kind == "mindvl" else _qwen2(text, keys),
            tokens=_tokens(keys, text, path),
        )
    except ModelError as error:
        raise _located(error, keys) from error
    if vision.take("out_hidden_size", config.language.hidden_size) != config.language.hidden_size:
        raise WeightError(
            f"{vision.place}: out_hidden_size={vision.values['out_hidden_size']}, but the language model's hidden_size "
            f"is {config.language.hidden_size}. Fetch the file again."
        )
    if kind == "mindvl":
        vision.take("tokens_per_second", None)  # read with three axes only
    else:
        vision.values = {"tokens_per_second": 4} | vision.values  # transformers' default; published folders have 2
    for section in (text, vision, keys):
        section.refuse_the_rest()
    return config


def language_config_from_folder(path: Path) -> Qwen3LanguageConfig:
    """The configuration of a Qwen3 folder, a language model alone.

    Raises:
        WeightError: The folder is another one, or config.json has a key or a value we do not know.
    """
    keys = _read(path)
    if keys.take("model_type", None) != "qwen3":
        raise WeightError(
            f"{keys.place}: model_type={keys.values.get('model_type')!r} is not qwen3. Name a Qwen3 folder."
        )
    try:
        language = _qwen3(keys, keys)
    except ModelError as error:
        raise _located(error, keys) from error
    keys.refuse_the_rest()
    return language


def _vision(keys: _Keys, path: Path) -> VisionConfig:
    # Defaults are those of transformers' configuration, because published folders leave out what equals them.
    rope = keys.take("rope_parameters", None) or {}
    vision = VisionConfig(
        hidden_size=keys.number("hidden_size"),
        num_layers=keys.number("depth", 32),
        num_heads=keys.number("num_heads", 16),
        ffn_hidden_size=keys.number("intermediate_size", 3420),
        full_attention_layers=tuple(keys.take("fullatt_block_indexes", (7, 15, 23, 31))),
        window_size=keys.number("window_size", 112),
        patch_size=keys.number("patch_size", 14),
        temporal_patch_size=keys.number("temporal_patch_size", 2),
        spatial_merge_size=keys.number("spatial_merge_size", 2),
        in_channels=keys.number("in_channels", keys.take("in_chans", 3)),
        rotary_base=rope.get("rope_theta", VisionConfig.rotary_base),
        init_std=keys.take("initializer_range", 0.02),
    )
    return _with_image_settings(vision, path)


def _with_image_settings(vision: VisionConfig, path: Path) -> VisionConfig:
    """The same with the folder's mean and standard deviation of pixels, where it has a processor."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if not (path / name).is_file():
            continue
        stored = _json(path / name)
        images = stored.get("image_processor", stored) if isinstance(stored, dict) else {}
        if "image_mean" not in images or "image_std" not in images:
            continue
        same = {
            "patch_size": "patch_size",
            "merge_size": "spatial_merge_size",
            "temporal_patch_size": "temporal_patch_size",
        }
        for theirs, ours in same.items():
            if images.get(theirs, getattr(vision, ours)) != getattr(vision, ours):
                raise WeightError(
                    f"{path / name}: {theirs}={images[theirs]}, but config.json has {ours}={getattr(vision, ours)}. "
                    "Fetch both files again."
                )
        return replace(vision, image_mean=tuple(images["image_mean"]), image_std=tuple(images["image_std"]))
    return vision


def _qwen3(text: _Keys, root: _Keys) -> Qwen3LanguageConfig:
    sizes = _decoder(text, root)
    theta, sections = _rotary(text)
    if sections is not None:
        raise WeightError(
            f"{text.place}: mrope_section={sections}, but Qwen3 counts along one axis. Name another folder."
        )
    return Qwen3LanguageConfig(**sizes, head_dim=text.number("head_dim", 128), rotary_base=theta)


def _qwen2(text: _Keys, root: _Keys) -> Qwen2LanguageConfig:
    sizes = _decoder(text, root)
    theta, sections = _rotary(text)
    if sections is None or len(sections) != 3:
        raise WeightError(
            f"{text.place}: rope_scaling has mrope_section={sections}, not three numbers. Name a Qwen2.5-VL folder."
        )
    time, height, width = sections
    head_dim = sizes["hidden_size"] // sizes["num_heads"]
    return Qwen2LanguageConfig(**sizes, head_dim=head_dim, rotary_base=theta, mrope_sections=(time, height, width))


def _decoder(text: _Keys, root: _Keys) -> dict[str, Any]:
    tied = [place.take("tie_word_embeddings", False) for place in (text, root)]  # either counts for transformers
    return {
        "hidden_size": text.number("hidden_size"),
        "num_layers": text.number("num_hidden_layers"),
        "num_heads": text.number("num_attention_heads"),
        "num_kv_heads": text.number("num_key_value_heads"),
        "ffn_hidden_size": text.number("intermediate_size"),
        "vocab_size": text.number("vocab_size"),
        "tie_embeddings": any(tied),
        "norm_epsilon": text.number("rms_norm_eps", 1e-6, whole=False),
        "max_positions": text.number("max_position_embeddings"),
        "init_std": text.take("initializer_range", 0.02),
    }


def _rotary(text: _Keys) -> tuple[float, list[int] | None]:
    """Base and, with three axes, the pairs of each; old folders keep the base outside."""
    given = {**(text.take("rope_scaling", None) or {}), **(text.take("rope_parameters", None) or {})}
    theta = given.pop("rope_theta", text.take("rope_theta", 1_000_000.0))
    kinds = {given.pop(name, "default") for name in ("type", "rope_type")}
    sections = given.pop("mrope_section", None)
    if given or not kinds <= {"default", "mrope"}:
        raise WeightError(
            f"{text.place}: rotary embedding of kind {sorted(kinds)} with {sorted(given)} is not supported. "
            "Use a folder without stretched positions."
        )
    return theta, sections


def _tokens(keys: _Keys, text: _Keys, path: Path) -> TokenConfig:
    generation_file = path / "generation_config.json"
    generation = _json(generation_file) if generation_file.is_file() else {}

    def first(name: str) -> Any:
        found = [place[name] for place in (keys.values, text.values, generation) if place.get(name) is not None]
        return found[0] if found else None

    end, pad = first("eos_token_id"), first("pad_token_id")
    if pad is None:
        pad = first("bos_token_id")  # <|endoftext|> is both in Qwen's tokenizers
    if end is None or pad is None:
        name = "eos_token_id" if end is None else "pad_token_id"
        raise WeightError(f"{keys.place}: {name} is missing. Add the id from the folder's tokenizer.")
    return TokenConfig(
        image=keys.take("image_token_id"),
        vision_start=keys.take("vision_start_token_id"),
        vision_end=keys.take("vision_end_token_id"),
        end_of_turn=end[0] if isinstance(end, list) else end,
        pad=pad,
        video=keys.take("video_token_id", None),
    )


def _located(error: ModelError, keys: _Keys) -> WeightError:
    return error if isinstance(error, WeightError) else WeightError(f"{keys.place}: {error}")


def _read(path: Path) -> _Keys:
    file = path / "config.json"
    return _Keys(_json(file), str(file))


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise WeightError(f"{file}: there is no such file. Name a transformers model folder.") from None
    except (OSError, ValueError) as error:
        raise WeightError(f"{file}: not JSON ({error}). Fetch the file again.") from error
