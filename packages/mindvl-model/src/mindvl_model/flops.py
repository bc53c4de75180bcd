# SPDX-License-Identifier: Apache-2.0
"""Exact FLOPs of one packed sequence, from the lengths of its segments and the grids of its images.

Used by metrics and the layout search. A product of [M, K] and [K, N] has 2 * M * K * N FLOPs; only matrix products are
counted. Causal attention is counted as the lower triangle with its diagonal, not as the square that some kernels compute.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from mindvl_model.config import MindVLConfig, VisionConfig
from mindvl_model.language_config import LanguageConfig, LatentAttention
from mindvl_model.parameters import PARTS, Part
from mindvl_model.vision.positions import Grid, patch_order


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of one part of the model."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """FLOPs of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Model FLOPs of one pack by part; activation recomputation is not counted."""

    vision: Work
    projector: Work
    language: Work
    mtp: Work  # multi-token prediction, including its use of the output layer

    @property
    def forward(self) -> int:
        """Forward FLOPs of the whole model."""
        return sum(part.forward for part in self._parts)

    @property
    def backward(self) -> int:
        """Backward FLOPs of the whole model."""
        return sum(part.backward for part in self._parts)

    @property
    def total(self) -> int:
        """Forward and backward FLOPs of the whole model."""
        return self.forward + self.backward

    @property
    def _parts(self) -> tuple[Work, ...]:
        return self.vision, self.projector, self.language, self.mtp

    def as_dict(self) -> dict[str, dict[str, int] | int]:
        """Return fields and sums for JSON."""
        return asdict(self) | {"forward": self.forward, "backward": self.backward, "total": self.total}


def pack_flops(
    config: MindVLConfig,
    segment_lengths: Sequence[int],
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    *,
    num_loss_tokens: int | None = None,
    trainable: Collection[Part] = PARTS,
    adapted: bool = False,
    multi_token: bool = True,
) -> Flops:
    """Compute the FLOPs of one forward and backward pass.

    The backward pass of a frozen part has no gradients of weights, and gradients of inputs only if an earlier part is
    trainable. The blank image that packs without images encode is not counted.

    Args:
        config: Configuration of the model.
        segment_lengths: Tokens of each segment; include the padding if the model computes it.
        image_grids: Patches along time, height and width of each image.
        video_grids: Patches along time, height and width of each video.
        num_loss_tokens: Tokens with a label: the output layer is counted for these only, because the loss needs no other
            logits; the same number for each depth of multi-token prediction. None: all tokens.
        trainable: Trainable parts; empty for inference.
        adapted: These parts train low-rank adapters only: weights have no gradients. The products of the adapters
            themselves are not counted.
        multi_token: Count multi-token prediction, which runs in training only.
    """
    vision, projector, language = (part in trainable for part in PARTS)
    tokens = sum(segment_lengths)
    pairs = sum(length * (length + 1) // 2 for length in segment_lengths)
    layers = _decoder(config.language, tokens, pairs)
    rows = tokens if num_loss_tokens is None else num_loss_tokens
    head = _matmul(rows, config.language.hidden_size, config.language.vocab_size)
    needs_input_gradient = vision or projector
    extra = config.language.num_mtp_layers if multi_token else 0
    size = config.language.hidden_size
    # Projection of embeddings and hidden states; output layer.
    joined = extra * (_matmul(tokens, 2 * size, size) + head)
    deeper = _times(_layer(config.language, tokens, pairs, dense=False), extra)
    return Flops(
        vision=_vision_encoder(config.vision, image_grids, video_grids).work(
            weights=vision and not adapted, inputs=vision
        ),
        projector=_projector(config, [*image_grids, *video_grids]).work(
            weights=projector and not adapted,
            inputs=needs_input_gradient,  # the norm of the projector needs the gradient of the first layer's input
        ),
        language=(layers + _Products(linear=head)).work(
            weights=language and not adapted, inputs=language or needs_input_gradient
        ),
        mtp=(deeper + _Products(linear=joined)).work(
            weights=language and not adapted, inputs=language or needs_input_gradient
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Products:
    """Forward FLOPs of matrix products, by the gradients that their backward pass computes."""

    linear: int = 0  # with weights: gradients of inputs and of weights
    first: int = 0  # with weights, applied to input data: gradients of weights only
    attention: int = 0  # of two activations: gradients of both

    def __add__(self, other: "_Products") -> "_Products":
        return _Products(
            linear=self.linear + other.linear,
            first=self.first + other.first,
            attention=self.attention + other.attention,
        )

    def work(self, *, weights: bool, inputs: bool) -> Work:
        """FLOPs of a part that is trainable (`weights`) or needs gradients of its inputs (`inputs`)."""
        backward = (weights + inputs) * self.linear + weights * self.first + 2 * inputs * self.attention
        return Work(forward=self.linear + self.first + self.attention, backward=backward)


def _matmul(rows: int, inputs: int, outputs: int) -> int:
    return 2 * rows * inputs * outputs


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
    # For images the kernel is summed over time, so one frame is multiplied (PatchEmbedding._embed).
    embed = _matmul(_patches(images), frame, hidden)
    embed += _matmul(_patches(videos), frame * config.temporal_patch_size, hidden)
    matrices = 3 if config.entry.gated else 2
    layer = _matmul(patches, hidden, 4 * hidden) + _matmul(patches, hidden, matrices * config.ffn_hidden_size)
    return _Products(linear=config.num_layers * layer, first=embed, attention=4 * pairs * hidden)


@lru_cache(maxsize=1 << 16)
def _pairs(grid: Grid, config: VisionConfig) -> tuple[int, int]:
    """Number of pairs of patches in full and in window attention; cached, because image sizes recur."""
    order = patch_order([grid], config)
    return sum(n * n for n in order.full.lengths), sum(n * n for n in order.windows.lengths)


def _projector(config: MindVLConfig, grids: Sequence[Grid]) -> _Products:
    blocks = _patches(grids) // config.vision.spatial_merge_size**2
    size = config.vision.hidden_size * config.vision.spatial_merge_size**2
    merger = _matmul(blocks, size, size) + _matmul(blocks, size, config.language.hidden_size)
    return _Products(linear=(1 + len(config.vision.deepstack_layers)) * merger)


def _patches(grids: Sequence[Grid]) -> int:
    return sum(time * height * width for time, height, width in grids)


def _decoder(config: LanguageConfig, tokens: int, pairs: int) -> _Products:
    """Products of all layers, without the output layer."""
    dense, routed = (_layer(config, tokens, pairs, dense=kind) for kind in (True, False))
    return _times(dense, config.num_dense_layers) + _times(routed, config.num_layers - config.num_dense_layers)


def _layer(config: LanguageConfig, tokens: int, pairs: int, *, dense: bool) -> _Products:
    """Attention and the MLP, or the router and the routed and shared experts of each token."""
    hidden, experts = config.hidden_size, config.experts
    if dense or experts is None:
        linear = 3 * _matmul(tokens, hidden, config.ffn_hidden_size)
    else:
        used = experts.experts_per_token + experts.num_shared_experts
        linear = _matmul(tokens, hidden, experts.num_experts)
        linear += 3 * used * _matmul(tokens, hidden, experts.expert_ffn_hidden_size)
    return _attention(config, tokens, pairs) + _Products(linear=linear)


def _attention(config: LanguageConfig, tokens: int, pairs: int) -> _Products:
    hidden, heads, attention = config.hidden_size, config.num_heads, config.attention
    if attention.kind == "latent":
        return _latent_attention(attention, hidden, heads, tokens, pairs)
    size = attention.head_dim
    projections = _matmul(tokens, hidden, (heads + 2 * attention.num_kv_heads) * size)
    projections += _matmul(tokens, heads * size, hidden)
    return _Products(linear=projections, attention=4 * pairs * heads * size)


def _latent_attention(config: LatentAttention, hidden: int, heads: int, tokens: int, pairs: int) -> _Products:
    query_key, value = config.nope_head_dim + config.rope_head_dim, config.value_head_dim
    rank = config.q_lora_rank
    projections = _matmul(tokens, hidden, (rank or 0) + config.kv_lora_rank + config.rope_head_dim)
    projections += _matmul(tokens, rank or hidden, heads * query_key)
    projections += _matmul(tokens, config.kv_lora_rank, heads * (config.nope_head_dim + value))
    projections += _matmul(tokens, heads * value, hidden)
    return _Products(linear=projections, attention=2 * pairs * heads * (query_key + value))
