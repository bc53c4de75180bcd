# SPDX-License-Identifier: Apache-2.0
"""What a MindVL model is: vision encoder, projector, language model and the token ids that join them.

Names and meanings follow the configuration of Qwen2.5-VL in transformers; families of language models stand in
language_config.py, named sizes in sizes.py.
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

VOCABULARY_MULTIPLE = 128  # so that any usual tp_size divides it


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The Qwen2.5-VL vision transformer; the projector takes its spatial_merge_size**2 neighbouring patches at once."""

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_hidden_size: int
    full_attention_layers: tuple[int, ...]  # from 0; all others attend inside windows
    window_size: int = 112  # pixels; a multiple of patch_size * spatial_merge_size
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-6
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)  # CLIP, of pixels in 0..1
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    init_std: float | None = 0.02  # of fresh matrices; None: 1 / sqrt(inputs), better for very small models

    def __post_init__(self) -> None:
        check_range(self, 1, MAX_SIZE, "hidden_size", "num_heads", "ffn_hidden_size", "window_size")
        check_range(self, 1, MAX_LAYERS, "num_layers")
        check_range(self, 1, 1024, "patch_size", "temporal_patch_size", "spatial_merge_size")
        check_range(self, 1.0, 1e30, "rotary_base")
        check_range(self, 0.0, 1.0, "norm_epsilon")
        check_range(self, 0.0, 1e3, "init_std")
        if self.temporal_patch_size != 2:
            raise ModelError(
                f"temporal_patch_size={self.temporal_patch_size} is not supported: a video patch holds two frames. "
                "Use 2."
            )
        if self.in_channels != 3:
            raise ModelError(f"in_channels={self.in_channels} is not supported: images have 3 channels. Use 3.")
        if not min(self.image_std) > 0:
            raise ModelError(f"image_std={list(self.image_std)} must be above 0, as pixels are divided by it.")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ModelError(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads}: the head size must be whole and a "
                "multiple of 4 for two rotary axes. Change one of them."
            )
        outside = [layer for layer in self.full_attention_layers if not 0 <= layer < self.num_layers]
        if outside:
            raise ModelError(
                f"full_attention_layers={outside} are not among the {self.num_layers} layers. Remove them."
            )
        if self.window_size % (self.patch_size * self.spatial_merge_size):
            raise ModelError(
                f"window_size={self.window_size} is not a multiple of patch_size * spatial_merge_size = "
                f"{self.patch_size * self.spatial_merge_size} pixels. Use one that is."
            )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """Ids of the tokens the model itself must know; they come from the tokenizer."""

    image: int  # <|image_pad|>, replaced by a visual token
    vision_start: int
    vision_end: int
    end_of_turn: int  # <|im_end|>, where generation stops
    pad: int  # <|endoftext|>
    video: int | None = None  # <|video_pad|>; a model without it takes no videos


@dataclass(frozen=True, kw_only=True)
class MindVLConfig:
    """Vision encoder + MLP projector + language model (MindVL, section 5.1)."""

    vision: VisionConfig
    language: LanguageConfig
    tokens: TokenConfig

    @property
    def position_kind(self) -> Literal["rope", "mrope", "mrope_all_axes"]:
        """How positions of visual tokens are counted: one by one, or by their place in time, height and width."""
        if not isinstance(self.language, Qwen2LanguageConfig):
            return "rope"
        return "mrope" if self.language.after_video == "height_width" else "mrope_all_axes"

    def __post_init__(self) -> None:
        for name, value in vars(self.tokens).items():
            if value is not None and not 0 <= value < self.language.vocab_size:
                raise ModelError(
                    f"tokens.{name}={value} lies outside the vocabulary of {self.language.vocab_size}. "
                    "Take the ids from the tokenizer the model is trained with."
                )


def for_tokenizer(config: MindVLConfig, token_ids: dict[str, int], vocab_size: int) -> MindVLConfig:
    """The same model with the token ids and at least the vocabulary of a tokenizer.

    Args:
        token_ids: Id of each special token by its text, such as "<|image_pad|>".
        vocab_size: Tokens in the tokenizer, added ones included; the model keeps its own size where that is larger,
            because published models pad their vocabulary. A smaller one grows to a multiple of VOCABULARY_MULTIPLE.

    Raises:
        ModelError: The tokenizer lacks a token the model needs.
    """
    needed = {
        "image": "<|image_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
        "end_of_turn": "<|im_end|>",
        "pad": "<|endoftext|>",
    }
    missing = [text for text in needed.values() if text not in token_ids]
    if missing:
        raise ModelError(
            f"tokenizer: it has no {', '.join(missing)}. Use a Qwen tokenizer or add these special tokens."
        )
    language = config.language
    if vocab_size > language.vocab_size:
        language = replace(language, vocab_size=-(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)
    tokens = TokenConfig(
        **{field: token_ids[text] for field, text in needed.items()}, video=token_ids.get("<|video_pad|>")
    )
    return replace(config, language=language, tokens=tokens)


def config_from_json(document: dict[str, Any]) -> MindVLConfig:
    """The configuration that `dataclasses.asdict` and JSON made `document` of (a checkpoint's manifest).

    Raises:
        ModelError: A family or a field is not known to this version.
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
            f"model description: {error!r} is not known here. Checkpoint. Use the mindvl-model that wrote it."
        ) from error


def _check_types(config: Any) -> None:
    """Refuse fields whose values are of other types than the class says; JSON may hold anything.

    Raises:
        TypeError: By the name of the field.
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
