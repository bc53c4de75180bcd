# SPDX-License-Identifier: Apache-2.0
"""Blocks of vision encoder and projector, which are before the embedding on the first pipeline stage.

Comes after attention.py; stages.py puts them first. The vision encoder has no sequence parallelism:
tensor-parallel ranks split its matrices, or with spread_images the images, with complete matrices on every rank.
"""

from dataclasses import replace

from mindvl_model.counts import projector_parameters
from mindvl_train.layout_search.attention import Heads, attention_core
from mindvl_train.layout_search.blocks import Block, Setting, Traffic, gated_activation
from mindvl_train.layout_search.packs import image_segments


def vision_blocks(setting: Setting) -> list[Block]:
    """Patch embedding, layers and projector, in execution order."""
    return [_patch_embedding(setting), *_layers(setting), _projector(setting)]


def _base(setting: Setting, name: str) -> Block:
    trained = "vision" in setting.trained
    return Block(name=name, part="vision", trained=trained, weights=trained, inputs=trained)


def _patch_embedding(setting: Setting) -> Block:
    vision, wide, patches = setting.model.vision, setting.wide, setting.patches
    frame = vision.in_channels * vision.patch_size**2
    trained = "vision" in setting.trained
    pixels, hidden = patches * frame, wide * patches * vision.hidden_size
    angles = 8 * patches * vision.head_dim + 2 * patches
    if vision.num_position_embeddings:
        angles += 48 * patches  # rows and weights of the interpolation
    return replace(
        _base(setting, "patch embedding"),
        dense=(frame * vision.temporal_patch_size + vision.entry.patch_bias + vision.num_position_embeddings)
        * vision.hidden_size,
        kept=(wide * pixels + angles) * trained,
        forward_peak=8 * pixels + wide * pixels + hidden,
        backward_peak=2 * hidden
        + trained * 2 * setting.weight_gradient(frame * vision.temporal_patch_size * vision.hidden_size),
        matmul=2 * pixels * vision.hidden_size,
        first=2 * pixels * vision.hidden_size,
        elementwise=9 * pixels + 3 * hidden + bool(vision.num_position_embeddings) * 10 * hidden,
    )


def _layers(setting: Setting) -> list[Block]:
    vision = setting.model.vision
    full, windows = image_segments(setting.grids, vision)
    kinds = {is_full: _layer(setting, full if is_full else windows) for is_full in (True, False)}
    # A deepstack layer also gives its output to a merger.
    tapped = setting.wide * setting.patches * vision.hidden_size * ("vision" in setting.trained)
    layers = []
    for number in range(vision.num_layers):
        layer = kinds[number in vision.full_attention_layers]
        is_tapped = number in vision.deepstack_layers
        layers.append(replace(layer, kept=layer.kept + tapped) if is_tapped else layer)
    return layers


def _layer(setting: Setting, lengths: tuple[int, ...]) -> Block:
    vision, wide, patches = setting.model.vision, setting.wide, setting.patches
    tp = 1 if setting.spread_images else setting.tp_size
    hidden, ffn = vision.hidden_size, vision.ffn_hidden_size / tp
    trained = "vision" in setting.trained
    heads = Heads(query=vision.num_heads / tp, key=vision.num_heads / tp, width=vision.head_dim, value=vision.head_dim)
    core = attention_core(setting, lengths, heads)
    pack, projection = wide * patches * hidden, wide * patches * heads.numbers
    output, values = wide * patches * heads.query * heads.width, wide * patches * ffn
    gated = vision.entry.gated
    wide_matrices = 2 if gated else 1  # into the MLP
    # A gated MLP keeps both halves and their product; the other its input and output of the activation.
    middle = (wide_matrices + 1) * values
    kept = 2 * (2 * pack + 4 * patches) + core.kept + output + middle
    if core.holds_values:
        kept += wide * patches * heads.key * heads.width if setting.splits_heads else projection
    forward, backward = gated_activation(setting, patches, ffn)
    if not gated:
        forward, backward = 2 * values, 4 * values
    gradient = setting.weight_gradient(hidden * max(wide_matrices * ffn, heads.numbers)) if trained else 0.0
    all_reduce = 2 * setting.ring(tp) * pack
    return replace(
        _base(setting, "vision layer"),
        dense=round(hidden * (heads.numbers + heads.query * heads.width + (wide_matrices + 1) * ffn))
        + round(heads.numbers + wide_matrices * ffn)
        + (6 if vision.entry.norm_bias else 4) * hidden,
        kept=kept * trained,
        boundary=pack * trained,
        forward_peak=(kept * trained or 2 * pack + max(projection, middle)) + 2 * pack + forward,
        backward_peak=2 * pack + max(backward, gradient + wide_matrices * values, core.peak + projection - middle),
        matmul=2 * patches * hidden * (heads.numbers + heads.query * heads.width + (wide_matrices + 1) * ffn),
        attention=4 * sum(length**2 for length in lengths) * heads.query * heads.width,
        elementwise=14 * pack + middle + 3 * projection,
        sent=Traffic(tp=2 * all_reduce),
    )


def _projector(setting: Setting) -> Block:
    vision, wide, patches = setting.model.vision, setting.wide, setting.patches
    tp = 1 if setting.spread_images else setting.tp_size
    output = setting.model.language.hidden_size
    size = vision.hidden_size * vision.spatial_merge_size**2
    visual = patches // vision.spatial_merge_size**2
    trained = "projector" in setting.trained
    arrives = setting.gradient_arrives
    pack, middle, tokens = wide * patches * vision.hidden_size, wide * visual * size / tp, wide * visual * output
    mergers = 1 + len(vision.deepstack_layers)
    tokens *= mergers
    kept = mergers * (arrives * (pack + 4 * patches + middle) + trained * (pack + middle))
    gradient = setting.weight_gradient(size * size / tp) if trained else 0.0
    peers = setting.tp_size * setting.cp_size if setting.spread_images else 1
    gathered = setting.ring(peers) * tokens * peers
    norm_weights = 2 if vision.entry.norm_bias else 1
    replicated = norm_weights * (vision.hidden_size + (mergers - 1) * size) + mergers * output
    return Block(
        name="projector",
        part="projector",
        dense=round((projector_parameters(vision, output) - replicated) / tp + replicated),
        trained=trained,
        kept=kept,
        boundary=pack,
        forward_peak=kept + 2 * middle + 2 * tokens,
        backward_peak=pack + 2 * middle + 2 * tokens + gradient,
        matmul=mergers * 2 * visual * size * (size + output) / tp,
        elementwise=mergers * (4 * pack + 4 * middle) + 2 * tokens,
        sent=Traffic(tp=2 * setting.ring(tp) * tokens + (gathered if setting.spread_images else 0.0)),
        weights=trained,
        inputs=arrives,
    )
