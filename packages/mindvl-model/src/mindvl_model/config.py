# SPDX-License-Identifier: Apache-2.0
"""What a MindVL model is: vision tower, projector, language model and the token ids that join them.

Names and meanings follow the configuration of Qwen2.5-VL and Qwen3 in transformers.
"""

from dataclasses import dataclass, replace
from typing import Literal

from mindvl_model.errors import ModelError


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
class Qwen3LanguageConfig:
    """A dense Qwen3 decoder."""

    kind: Literal["qwen3"] = "qwen3"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tie_embeddings: bool = False  # one matrix for input and output
    rotary_base: float = 1_000_000.0
    norm_epsilon: float = 1e-6
    max_positions: int = 40960  # longest sequence the exported folder declares
    init_std: float | None = 0.02  # of fresh matrices; None: 1 / sqrt(inputs), better for very small models

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}. Change one of them."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd; rotary embedding turns pairs. Use an even size.")


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
    """Vision tower + MLP projector + language model (MindVL, section 5.1)."""

    vision: VisionConfig
    language: Qwen3LanguageConfig
    tokens: TokenConfig

    def __post_init__(self) -> None:
        for name, value in vars(self.tokens).items():
            if value is not None and not 0 <= value < self.language.vocab_size:
                raise ModelError(
                    f"tokens.{name}={value} lies outside the vocabulary of {self.language.vocab_size}. "
                    "Take the ids from the tokenizer the model is trained with."
                )


QWEN_TOKENS = TokenConfig(
    image=151655, vision_start=151652, vision_end=151653, end_of_turn=151645, pad=151643, video=151656
)

NAMED_SIZES: dict[str, MindVLConfig] = {
    # Small enough to train on two CPU cores; the vocabulary is set to the tokenizer's.
    "tiny": MindVLConfig(
        vision=VisionConfig(
            hidden_size=128, num_layers=4, num_heads=4, ffn_hidden_size=256, full_attention_layers=(1, 3), init_std=None
        ),
        language=Qwen3LanguageConfig(
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            ffn_hidden_size=384,
            vocab_size=512,
            tie_embeddings=True,
            rotary_base=10000.0,
            max_positions=8192,
            init_std=None,
        ),
        tokens=TokenConfig(image=5, vision_start=3, vision_end=4, end_of_turn=2, pad=0, video=6),
    ),
    # Vision tower of Qwen2.5-VL-72B, Qwen3-8B (paper, section 5.1).
    "mindvl-8b": MindVLConfig(
        vision=VisionConfig(
            hidden_size=1280,
            num_layers=32,
            num_heads=16,
            ffn_hidden_size=3456,
            full_attention_layers=(7, 15, 23, 31),
        ),
        language=Qwen3LanguageConfig(
            hidden_size=4096,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden_size=12288,
            vocab_size=151936,
        ),
        tokens=QWEN_TOKENS,
    ),
}


def named_config(name: str) -> MindVLConfig:
    """One of the sizes in NAMED_SIZES.

    Raises:
        ModelError: No size has this name.
    """
    try:
        return NAMED_SIZES[name]
    except KeyError:
        raise ModelError(f"model: no size is called {name!r}. Use one of {sorted(NAMED_SIZES)}.") from None


def for_tokenizer(config: MindVLConfig, token_ids: dict[str, int], vocab_size: int) -> MindVLConfig:
    """The same model with the token ids and at least the vocabulary of a tokenizer.

    Args:
        token_ids: Id of each special token by its text, such as "<|image_pad|>".
        vocab_size: Tokens in the tokenizer, added ones included; the model keeps its own size where that is larger,
            because published models pad their vocabulary.

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
    language = replace(config.language, vocab_size=max(config.language.vocab_size, vocab_size))
    tokens = TokenConfig(
        **{field: token_ids[text] for field, text in needed.items()}, video=token_ids.get("<|video_pad|>")
    )
    return replace(config, language=language, tokens=tokens)
