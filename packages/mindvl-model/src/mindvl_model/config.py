# SPDX-License-Identifier: Apache-2.0
"""Configuration of a MindVL model: vision encoder, projector, language model and special token ids.

Names and meanings follow the configurations in transformers. The vision encoders are in vision_config.py, the properties of
language models in language_config.py, their families in families/, the named sizes in sizes.py.
"""

import math
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mindvl_model.errors import ModelError
from mindvl_model.families.registry import PRESETS
from mindvl_model.language_config import LanguageConfig
from mindvl_model.vision_config import VisionConfig

__all__ = ["MindVLConfig", "TokenConfig", "VisionConfig", "config_from_json", "for_tokenizer"]

VOCABULARY_MULTIPLE = 128  # divisible by every usual tp_size


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
    def position_kind(self) -> Literal["rope", "mrope", "mrope_all_axes", "mrope_frames"]:
        """Position ids of visual tokens: sequential ("rope"), or by time, height and width (M-RoPE).

        "mrope_frames": each temporal patch of a video has the positions of an image, because the text has its time.
        """
        if self.language.rope.mrope_sections is None:
            return "rope"
        if self.vision.entry.video.timestamps:
            return "mrope_frames"
        return "mrope" if self.language.rope.after_video == "height_width" else "mrope_all_axes"

    def __post_init__(self) -> None:
        if len(self.vision.deepstack_layers) > self.language.num_layers:
            raise ModelError(
                f"deepstack_layers: {len(self.vision.deepstack_layers)} outputs of the vision encoder are added to the first "
                f"layers of the language model, which has only num_layers={self.language.num_layers}. Use fewer."
            )
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
            f"tokenizer: special tokens {', '.join(missing)} are missing. Add these tokens to the tokenizer."
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
        # Manifests of earlier versions have the fields of a preset.
        language = _rebuilt(PRESETS[document["language"]["kind"]], document["language"])
        _check_types(language)
        config = MindVLConfig(
            vision=_rebuilt(VisionConfig, document["vision"]),
            language=language.decoder(),
            tokens=_rebuilt(TokenConfig, document["tokens"]),
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


def _rebuilt(hint: Any, value: Any) -> Any:
    """Rebuild a value of this type from JSON; `kind` selects the dataclass of a union."""
    members = [one for one in get_args(hint) or (hint,) if is_dataclass(one)]
    if isinstance(value, list):
        return tuple(value)
    if not members or not isinstance(value, dict):
        return value
    kinds = {getattr(one, "kind", None): one for one in members}
    cls: Any = members[0] if len(members) == 1 else kinds[value["kind"]]
    hints = get_type_hints(cls)
    return cls(**{name: _rebuilt(hints[name], one) for name, one in value.items()})
