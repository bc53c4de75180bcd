# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of one packed pack, exact, from its segments and the grids of its images.

Comes after config.py; metrics and a planner read it. A product of [M, K] and [K, N] is 2 * M * K * N; only matrix
products is counted. Causal attention is the triangle with its diagonal, not the square that some kernels run.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.counts import num_mtp_layers
from mindvl_model.language_config import (
    DeepSeekV3LanguageConfig,
    LanguageConfig,
    Qwen3MoELanguageConfig,
)
from mindvl_model.parameters import PARTS, Part
from mindvl_model.vision.positions import Grid, patch_order


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations of one part of the model."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations of one pack by part; recomputed activations are not counted, because they are no work on the data."""

    vision: Work
    projector: Work
    language: Work
    mtp: Work  # multi-token prediction, with its share of the head

    @property
    def forward(self) -> int:
        """Of the whole model."""
        return sum(part.forward for part in self._parts)

    @property
    def backward(self) -> int:
        """Of the whole model."""
        return sum(part.backward for part in self._parts)

    @property
    def total(self) -> int:
        """Forward and backward of the whole model."""
        return self.forward + self.backward

    @property
    def _parts(self) -> tuple[Work, ...]:
        return self.vision, self.projector, self.language, self.mtp

    def as_dict(self) -> dict[str, dict[str, int] | int]:
        """Fields and sums, for JSON."""
        return asdict(self) | {"forward": self.forward, "backward": self.backward, "total": self.total}


def pack_flops(
    config: MindVLConfig,
    segment_lengths: Sequence[int],
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    *,
    trainable: Collection[Part] = PARTS,
    multi_token: bool = True,
) -> Flops:
    """Operations of one forward and backward.

    A frozen part needs no gradient of its weights; gradients of its inputs are needed where something trainable lies
    before it. The blank image that a pack without media runs for the sake of other ranks is not counted.

    Args:
        segment_lengths: Tokens of each segment, the padding's included if the pack is computed with it.
        image_grids, video_grids: Patches along time, height and width of each; an image is embedded as one frame.
        trainable: Parts that learn; empty for inference.
        multi_token: Count multi-token prediction, which runs in training only.
    """
    vision, projector, language = (part in trainable for part in PARTS)
    tokens = sum(segment_lengths)
    pairs = sum(length * (length + 1) // 2 for length in segment_lengths)
    layers, head = _decoder(config.language, tokens, pairs)
    gradient_arrives = vision or projector
    extra = num_mtp_layers(config.language) if multi_token else 0
    size = config.language.hidden_size
    joined = extra * (_matmul(tokens, 2 * size, size) + head)  # joins embedding and hidden state; the shared head
    deeper = _times(_routed_layer(config.language, tokens, pairs), extra) if extra else _Products()
    return Flops(
        vision=_vision_encoder(config.vision, image_grids, video_grids).work(weights=vision, inputs=vision),
        projector=_projector(config, [*image_grids, *video_grids]).work(
            weights=projector,
            inputs=gradient_arrives,  # the projector's norm learns from the gradient of its first layer's input
        ),
        language=(layers + _Products(linear=head)).work(weights=language, inputs=language or gradient_arrives),
        mtp=(deeper + _Products(linear=joined)).work(weights=language, inputs=language or gradient_arrives),
    )


@dataclass(frozen=True, kw_only=True)
class _Products:
    """Forward operations, by what their backward needs."""

    linear: int = 0  # with weights: as much again for inputs and for weights
    first: int = 0  # with weights, of data that takes no gradient
    attention: int = 0  # both operands are activations

    def __add__(self, other: "_Products") -> "_Products":
        return _Products(
            linear=self.linear + other.linear,
            first=self.first + other.first,
            attention=self.attention + other.attention,
        )

    def work(self, *, weights: bool, inputs: bool) -> Work:
        """Forward and backward of a part that learns (`weights`) or lies behind one that does (`inputs`)."""
        backward = (weights + inputs) * self.linear + weights * self.first + 2 * inputs * self.attention
        return Work(forward=self.linear + self.first + self.attention, backward=backward)


def _matmul(packs: int, inputs: int, outputs: int) -> int:
    return 2 * packs * inputs * outputs


def _times(products: _Products, count: int) -> _Products:
    return _Products(linear=count * products.linear, first=count * products.first, attention=count * products.attention)


def _vision_encoder(config: VisionConfig, images: Sequence[Grid], videos: Sequence[Grid]) -> _Products:
    grids = [*images, *videos]
    if not grids:
        return _Products()
    full, windows = map(sum, zip(*(_pairs(grid, config) for grid in grids), strict=True))
    num_full = len(config.full_attention_layers)
    pairs = num_full * full + (config.num_layers - num_full) * windows
    hidden, patches = config.hidden_size, _patches(grids)
    frame = config.in_channels * config.patch_size**2
    # The kernel's slices over time are summed for images, so one frame is multiplied; see VisionEncoder.embed.
    embed = _matmul(_patches(images), frame, hidden)
    embed += _matmul(_patches(videos), frame * config.temporal_patch_size, hidden)
    layer = _matmul(patches, hidden, 4 * hidden) + _matmul(patches, hidden, 3 * config.ffn_hidden_size)
    return _Products(linear=config.num_layers * layer, first=embed, attention=4 * pairs * hidden)


@lru_cache(maxsize=1 << 16)
def _pairs(grid: Grid, config: VisionConfig) -> tuple[int, int]:
    """Pairs of patches that attend to each other in a full layer and in a windowed one; kept, as sizes come back."""
    order = patch_order([grid], config)
    return sum(n * n for n in order.full.lengths), sum(n * n for n in order.windows.lengths)


def _projector(config: MindVLConfig, grids: Sequence[Grid]) -> _Products:
    blocks = _patches(grids) // config.vision.spatial_merge_size**2
    size = config.vision.hidden_size * config.vision.spatial_merge_size**2
    return _Products(linear=_matmul(blocks, size, size) + _matmul(blocks, size, config.language.hidden_size))


def _patches(grids: Sequence[Grid]) -> int:
    return sum(time * height * width for time, height, width in grids)


def _decoder(config: LanguageConfig, tokens: int, pairs: int) -> tuple[_Products, int]:
    """All layers, and the head."""
    dense = _dense_mlp(config, tokens)
    if isinstance(config, DeepSeekV3LanguageConfig):
        attention = _latent_attention(config, tokens, pairs)
        first = _times(attention + dense, config.num_dense_layers)
        layers = first + _times(_routed_layer(config, tokens, pairs), config.num_layers - config.num_dense_layers)
    elif isinstance(config, Qwen3MoELanguageConfig):
        layers = _times(_routed_layer(config, tokens, pairs), config.num_layers)
    else:
        layers = _times(_attention(config, tokens, pairs) + dense, config.num_layers)
    return layers, _matmul(tokens, config.hidden_size, config.vocab_size)


def _dense_mlp(config: LanguageConfig, tokens: int) -> _Products:
    return _Products(linear=3 * _matmul(tokens, config.hidden_size, config.ffn_hidden_size))


def _routed_layer(config: LanguageConfig, tokens: int, pairs: int) -> _Products:
    """Attention, router, and the experts that each token is sent to, shared ones too."""
    assert isinstance(config, Qwen3MoELanguageConfig | DeepSeekV3LanguageConfig)
    shared = config.num_shared_experts if isinstance(config, DeepSeekV3LanguageConfig) else 0
    experts = (config.experts_per_token + shared) * 3
    router = _matmul(tokens, config.hidden_size, config.num_experts)
    linear = router + experts * _matmul(tokens, config.hidden_size, config.expert_ffn_hidden_size)
    return _attention(config, tokens, pairs) + _Products(linear=linear)


def _attention(config: LanguageConfig, tokens: int, pairs: int) -> _Products:
    if isinstance(config, DeepSeekV3LanguageConfig):
        return _latent_attention(config, tokens, pairs)
    hidden, head, heads = config.hidden_size, config.head_dim, config.num_heads
    projections = _matmul(tokens, hidden, (heads + 2 * config.num_kv_heads) * head)
    projections += _matmul(tokens, heads * head, hidden)
    return _Products(linear=projections, attention=4 * pairs * heads * head)


def _latent_attention(config: DeepSeekV3LanguageConfig, tokens: int, pairs: int) -> _Products:
    hidden, heads, value = config.hidden_size, config.num_heads, config.value_head_dim
    query_key = config.nope_head_dim + config.rope_head_dim
    projections = _matmul(tokens, hidden, config.q_lora_rank + config.kv_lora_rank + config.rope_head_dim)
    projections += _matmul(tokens, config.q_lora_rank, heads * query_key)
    projections += _matmul(tokens, config.kv_lora_rank, heads * (config.nope_head_dim + value))
    projections += _matmul(tokens, heads * value, hidden)
    return _Products(linear=projections, attention=2 * pairs * heads * (query_key + value))
