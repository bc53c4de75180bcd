# SPDX-License-Identifier: Apache-2.0
"""Configuration of a MindVL model: vision encoder, projector, language model and special token ids.

Names and meanings follow the configuration of Qwen2.5-VL in transformers. The families of language models are in
language_config.py, the named sizes in sizes.py.
"""

import math
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mindvl_model.errors import ModelError
from mindvl_model.language_config import (
    FAMILIES,
    MAX_LAYERS,
    MAX_SIZE,
    LanguageConfig,
    Qwen2LanguageConfig,
    YarnConfig,
    check_range,
)

VOCABULARY_MULTIPLE = 128  # divisible by every usual tp_size


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision transformer of Qwen2.5-VL. The projector merges spatial_merge_size**2 neighbouring patches."""

    hidden_size: int  # width of the layers
    num_layers: int  # transformer layers
    num_heads: int  # attention heads
    ffn_hidden_size: int  # width inside the MLP
    full_attention_layers: tuple[int, ...]  # layer indices, from 0; the other layers use window attention
    window_size: int = 112  # Side of an attention window in pixels; a multiple of patch_size * spatial_merge_size.
    patch_size: int = 14  # side of a patch in pixels
    temporal_patch_size: int = 2  # frames of a patch; only 2 is supported
    spatial_merge_size: int = 2  # side of the block of patches that becomes one visual token
    in_channels: int = 3  # color channels; only 3 is supported
    rotary_base: float = 10000.0  # base of the rotary position embedding
    norm_epsilon: float = 1e-6  # epsilon of RMSNorm
    # Mean per channel for pixels in [0, 1], from CLIP.
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    # Standard deviation per channel for pixels in [0, 1], from CLIP.
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    init_std: float | None = 0.02  # standard deviation of initial weights; None: 1 / sqrt(fan_in), for small models

    def __post_init__(self) -> None:
        check_range(self, 1, MAX_SIZE, "hidden_size", "num_heads", "ffn_hidden_size", "window_size")
        check_range(self, 1, MAX_LAYERS, "num_layers")
        check_range(self, 1, 1024, "patch_size", "temporal_patch_size", "spatial_merge_size")
        check_range(self, 1.0, 1e30, "rotary_base")
        check_range(self, 0.0, 1.0, "norm_epsilon")
        check_range(self, 0.0, 1e3, "init_std")
        if self.temporal_patch_size != 2:
            raise ModelError(
                f"temporal_patch_size: must be 2 (a video patch covers two frames), got {self.temporal_patch_size}. "
                "Use 2."
            )
        if self.in_channels != 3:
            raise ModelError(f"in_channels: must be 3, because images are RGB, got {self.in_channels}. Use 3.")
        if not min(self.image_std) > 0:
            raise ModelError(f"image_std: must be above 0, got {list(self.image_std)}. Use three positive numbers.")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ModelError(
                f"hidden_size: must be num_heads times a multiple of 4 (for two rotary axes), got {self.hidden_size} "
                f"with num_heads={self.num_heads}. Change one of them."
            )
        outside = [layer for layer in self.full_attention_layers if not 0 <= layer < self.num_layers]
        if outside:
            raise ModelError(
                f"full_attention_layers: layers {outside} do not exist in a vision encoder with num_layers="
                f"{self.num_layers}. Remove them."
            )
        if self.window_size % (self.patch_size * self.spatial_merge_size):
            raise ModelError(
                f"window_size: must be a multiple of patch_size * spatial_merge_size = "
                f"{self.patch_size * self.spatial_merge_size} pixels, got {self.window_size}. Use a multiple."
            )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """Ids of the special tokens that the model uses, taken from the tokenizer."""

    image: int  # <|image_pad|>, the placeholder of a visual token
    vision_start: int
    vision_end: int
    end_of_turn: int  # <|im_end|>, which ends generation
    pad: int  # <|endoftext|>
    video: int | None = None  # <|video_pad|>; None: videos are not supported


@dataclass(frozen=True, kw_only=True)
class MindVLConfig:
    """Vision encoder + MLP projector + language model (MindVL, section 5.1)."""

    vision: VisionConfig
    language: LanguageConfig
    tokens: TokenConfig

    @property
    def position_kind(self) -> Literal["rope", "mrope", "mrope_all_axes"]:
        """Position ids of visual tokens: sequential ("rope"), or by time, height and width (M-RoPE)."""
        if not isinstance(self.language, Qwen2LanguageConfig):
            return "rope"
        return "mrope" if self.language.after_video == "height_width" else "mrope_all_axes"

    def __post_init__(self) -> None:
        for name, value in vars(self.tokens).items():
            if value is not None and not 0 <= value < self.language.vocab_size:
                raise ModelError(
                    f"tokens.{name}: must be an id below vocab_size={self.language.vocab_size}, got {value}. "
                    "Use the ids of the tokenizer that the model is trained with."
                )


def for_tokenizer(config: MindVLConfig, token_ids: dict[str, int], vocab_size: int) -> MindVLConfig:
    """Return the configuration with the token ids of a tokenizer and a vocabulary that is large enough for it.

    Args:
        token_ids: Id of each special token by its text, such as "<|image_pad|>".
        vocab_size: Number of tokens in the tokenizer, including added tokens. A larger vocab_size of the model is
            kept, because published models pad their vocabulary; a smaller one grows to a multiple of
            VOCABULARY_MULTIPLE.

    Raises:
        ModelError: The tokenizer lacks a special token that the model needs.
    """
    required = {
        "image": "<|image_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
        "end_of_turn": "<|im_end|>",
        "pad": "<|endoftext|>",
    }
    missing = [text for text in required.values() if text not in token_ids]
    if missing:
        raise ModelError(
            f"tokenizer: special tokens {', '.join(missing)} are missing. Use a Qwen tokenizer or add these tokens."
        )
    language = config.language
    if vocab_size > language.vocab_size:
        language = replace(language, vocab_size=-(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)
    tokens = TokenConfig(
        **{field: token_ids[text] for field, text in required.items()}, video=token_ids.get("<|video_pad|>")
    )
    return replace(config, language=language, tokens=tokens)


def config_from_json(document: dict[str, Any]) -> MindVLConfig:
    """Rebuild a configuration from `dataclasses.asdict` and JSON, as a checkpoint's manifest stores it.

    Raises:
        ModelError: A model family or a field is not known to this version.
    """
    try:
        language = dict(document["language"])
        family = FAMILIES[language["kind"]]
        if language.get("yarn") is not None:
            language["yarn"] = YarnConfig(**language["yarn"])
        config = MindVLConfig(
            vision=VisionConfig(**_with_tuples(document["vision"])),
            language=family(**_with_tuples(language)),
            tokens=TokenConfig(**document["tokens"]),
        )
        _check_types(config)
        return config
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"model configuration of the checkpoint: not readable by this version of mindvl-model ({error!r}). Use the "
            "version that wrote the checkpoint."
        ) from error


def _check_types(config: Any) -> None:
    """Check that the values of all fields have their declared types, because JSON may hold any type.

    Raises:
        TypeError: A value has another type; the message names the field.
    """
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            _check_types(value)
        elif not _fits(value, hint):
            raise TypeError(f"{name}={value!r:.60}")


def _fits(value: Any, hint: Any) -> bool:
    kind, args = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in args
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(value) == len(hints) and all(map(_fits, value, hints))
    if args:  # a union
        return any(_fits(value, one) for one in args)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
