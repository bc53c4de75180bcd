# SPDX-License-Identifier: Apache-2.0
"""Blocks of the language model: embedding, decoder layers, multi-token prediction, head with the loss.

Comes after attention.py; stages.py puts them on pipeline stages. Each function follows the module of the
same name in mindvl_model.megatron.
"""

from dataclasses import replace
from math import lcm

from mindvl_model.counts import layers_of
from mindvl_model.language_config import ExpertsConfig, GroupedQueryAttention, LatentAttention
from mindvl_train.layout_search.attention import Core, Heads, attention_core
from mindvl_train.layout_search.blocks import Block, Setting, Traffic, gated_activation, joined

_CHUNK = {"cpu": 4 * 2**20, "cuda": 64 * 2**20, "npu": 64 * 2**20}  # chunk size of logits in the loss, in bytes


def embedding_block(setting: Setting) -> Block:
    """Embedding and insertion of visual tokens."""
    language, wide = setting.model.language, setting.wide
    weights = language.vocab_size * language.hidden_size // setting.tp_size
    trained = "language" in setting.trained
    pack = wide * setting.pack.tokens * language.hidden_size
    visual = wide * setting.pack.patches // setting.model.vision.spatial_merge_size**2 * language.hidden_size
    angles = angles_bytes(setting)
    features = setting.pack_bytes * len(setting.model.vision.deepstack_layers)  # zero at text
    gradient = setting.weight_gradient(weights) if trained else 0.0
    return Block(
        name="embedding",
        part="language",
        dense=weights,
        trained=trained,
        kept=angles + features + (visual if setting.gradient_arrives else 0.0),
        boundary=0.0,
        forward_peak=3 * pack + features,
        backward_peak=max(gradient + pack, 2 * pack),
        elementwise=4 * pack,
        weights=trained,
        inputs=setting.gradient_arrives,
    )


def angles_bytes(setting: Setting) -> float:
    """Float32 cosines and sines, which every chunk makes for its layers."""
    return 2 * 4 * setting.tokens * _rotary_width(setting)


def decoder_layer(setting: Setting, number: int) -> Block:
    """Decoder layer with index `number`."""
    dense = number < setting.model.language.num_dense_layers
    return _layer(setting, "dense layer" if dense else "expert layer", dense=dense)


def mtp_block(setting: Setting) -> Block | None:
    """All depths of multi-token prediction with their losses; None if the model has none."""
    language = setting.model.language
    depths = language.num_mtp_layers
    if not depths:
        return None
    hidden, wide, tokens = language.hidden_size, setting.wide, setting.sliced
    layer = _layer(setting, "prediction", dense=language.experts is None)
    pack = wide * tokens * hidden
    trained = "language" in setting.trained
    # Stored for backward: inputs of two norms, of the projection and of the final norm.
    join = replace(
        layer,
        dense=2 * hidden**2 + 3 * hidden,
        experts=0,
        kept=(3 + 2 * trained) * pack + 12 * tokens,
        routed=0.0,
        boundary=pack,
        forward_peak=6 * pack,
        backward_peak=4 * pack,
        matmul=2 * tokens * 2 * hidden * hidden,
        attention=0.0,
        elementwise=8 * pack,
        sent=Traffic(),
    )
    head = replace(head_block(setting), dense=0, name="prediction head")
    return joined("prediction", [join, layer, replace(head, dense=0)] * depths)


def head_block(setting: Setting) -> Block:
    """Final norm, logits of the loss tokens and loss."""
    language, wide = setting.model.language, setting.wide
    hidden, vocabulary = language.hidden_size, language.vocab_size / setting.tp_size
    trained, rows = "language" in setting.trained, setting.loss_rows
    pack, logits = wide * setting.sliced * hidden, rows * vocabulary
    whole_pack, chosen = wide * setting.tokens * hidden, wide * rows * hidden
    weight = setting.weight_gradient(vocabulary * hidden) if trained else 0.0
    is_recomputed = setting.recompute != "none"
    kept, forward, backward = _loss_memory(setting, logits)
    held = pack + (chosen if trained or is_recomputed else 0.0) + 4 * setting.sliced
    matmul = 2 * rows * hidden * vocabulary
    return Block(
        name="head",
        part="language",
        dense=hidden + (0 if language.tie_embeddings else round(hidden * vocabulary)),
        trained=trained,
        kept=held + kept,
        boundary=pack,
        forward_peak=held + kept + forward,
        backward_peak=max(backward, (0.0 if is_recomputed else wide * logits) - kept + weight + 2 * whole_pack),
        matmul=matmul,
        repeated=matmul if is_recomputed and (trained or setting.gradient_arrives) else 0.0,
        elementwise=4 * wide * logits,
        sent=Traffic(tp=setting.ring(setting.tp_size) * whole_pack),
        weights=trained,
        inputs=trained or setting.gradient_arrives,
    )


def _loss_memory(setting: Setting, logits: float) -> tuple[float, float, float]:
    """Bytes of a loss with this number of logits: (kept for backward, temporary in forward, temporary in backward)."""
    wide, chunk = setting.wide, _CHUNK[setting.kernels]
    if setting.recompute != "none":  # linear_cross_entropy: pieces of at least 256 ids
        chunk = max(chunk, 4 * 256 * setting.loss_rows)
        language = setting.model.language
        sums = (4 + wide) * setting.loss_rows * language.hidden_size  # gradient of hidden states, and one part of it
        weight = (
            wide * language.vocab_size / setting.tp_size * language.hidden_size
            if "language" in setting.trained and setting.lora is None
            else 0.0
        )
        pieces = chunk if wide == 4 else 1.5 * chunk
        return 0.0, min(pieces, 1.5 * 4 * logits), min(pieces + chunk, 2.5 * 4 * logits) + sums + weight
    if setting.tp_size == 1 and wide == 4 and 4 * logits <= chunk:  # PyTorch's cross entropy
        return 4 * logits, 4 * logits, 8 * logits
    chunks = min(chunk, 4 * logits) * (1 if wide == 4 else 2)
    return wide * logits, chunks, wide * logits + (chunks if wide < 4 else 0.0)


def _layer(setting: Setting, name: str, *, dense: bool) -> Block:
    language = setting.model.language
    if language.attention.kind == "latent":
        attention = _latent_attention(setting, language.attention)
    else:
        attention = _grouped_attention(setting, language.attention)
    mlp = _dense_mlp(setting) if dense or language.experts is None else _expert_mlp(setting, language.experts)
    both = joined(name, [attention, mlp])
    return replace(both, boundary=setting.pack_bytes)


def _base(setting: Setting, name: str) -> Block:
    trained = "language" in setting.trained
    return Block(
        name=name,
        part="language",
        trained=trained,
        weights=trained,
        inputs=trained or setting.gradient_arrives,
    )


def _core(setting: Setting, heads: Heads) -> tuple[Core, float, float]:
    """(core attention, bytes sent over context-parallel ranks, additional stored bytes) for the heads of one tp rank."""
    cp, wide = setting.cp_size, setting.wide
    lengths = setting.pack.segments
    if missing := setting.tokens * cp - setting.pack.tokens:
        lengths = (*lengths, missing)
    if cp == 1:
        return attention_core(setting, lengths, heads), 0.0, 0.0
    shared = Heads(
        query=heads.query / cp, key=lcm(int(heads.key), cp) / cp, width=heads.width, value=heads.value
    )  # on this rank, of the whole pack
    core = attention_core(setting, lengths, shared)
    whole = wide * sum(lengths)
    sent = setting.ring(cp) * whole * (shared.numbers + shared.query * shared.value)
    # Queries, keys and values are views of the receive buffer; the output is stored separately.
    received = whole * shared.numbers if core.holds_values else 0.0
    views = whole * (shared.query + shared.key) * shared.width if core.holds_values else 0.0
    output = whole * shared.query * shared.value if core.holds_values and not setting.selective else 0.0
    return replace(core, holds_values=False), sent, received - views + output


def _grouped_attention(setting: Setting, attention: GroupedQueryAttention) -> Block:
    language, wide, tp = setting.model.language, setting.wide, setting.tp_size
    hidden, width, tokens = language.hidden_size, attention.head_dim, setting.tokens
    heads = Heads(query=language.num_heads / tp, key=attention.num_kv_heads / tp, width=width, value=width)
    core, sent, exchanged = _core(setting, heads)
    trained = "language" in setting.trained
    pack, whole_pack = wide * setting.sliced * hidden, wide * tokens * hidden
    projection, output = wide * tokens * heads.numbers, wide * tokens * heads.query * width
    normed = attention.qk_norm
    kept = pack + 4 * setting.sliced + core.kept + exchanged
    kept += (pack + output) * trained  # inputs of both matrices
    kept += (
        0 if trained or not core.holds_values or setting.cp_size > 1 else output
    )  # for the backward of core attention
    if normed or (core.holds_values and not setting.splits_heads):
        kept += projection
    if core.holds_values and setting.splits_heads:
        kept += wide * tokens * heads.key * width
    if normed and not setting.splits_heads:
        # With several groups, queries are copied from the projection before the norm.
        kept += (output if heads.key > 1 else 0.0) + 4 * tokens * (heads.query + heads.key)
    counts = layers_of(language)[0]
    gradient = setting.weight_gradient(hidden * heads.numbers) if trained else 0.0
    return replace(
        _base(setting, "attention"),
        dense=_split(counts.attention, tp, whole=2 * width * normed + hidden * attention.output_bias)
        + counts.norms // 2,
        kept=kept,
        forward_peak=kept + 2 * pack + projection + core.forward,
        backward_peak=2 * pack + max(core.peak + output, projection * 2 + gradient),
        matmul=2 * tokens * hidden * (heads.numbers + heads.query * width),
        attention=4 * _pairs(setting) * heads.query * width / setting.cp_size,
        elementwise=7 * pack + (6 if normed else 3) * wide * tokens * (heads.query + heads.key) * width,
        sent=Traffic(tp=2 * setting.ring(tp) * whole_pack, cp=sent),
    )


def _latent_attention(setting: Setting, attention: LatentAttention) -> Block:
    language, wide, tp = setting.model.language, setting.wide, setting.tp_size
    hidden, tokens, sliced = language.hidden_size, setting.tokens, setting.sliced
    q_rank, kv_rank, rope = attention.q_lora_rank or 0, attention.kv_lora_rank, attention.rope_head_dim
    q_input = q_rank or hidden  # without a latent, queries are projected from the layer's input
    width, value = attention.nope_head_dim + rope, attention.value_head_dim
    heads = Heads(query=language.num_heads / tp, key=language.num_heads / tp, width=width, value=value)
    core, sent, exchanged = _core(setting, heads)
    trained = "language" in setting.trained
    pack, whole_pack = wide * sliced * hidden, wide * tokens * hidden
    key_value = wide * tokens * heads.key * (attention.nope_head_dim + value)
    output = wide * tokens * heads.query * value
    queries = wide * tokens * heads.query * width
    kept = pack + wide * sliced * (q_rank + kv_rank + rope) + 12 * sliced + core.kept + exchanged
    # The down-projections are plain matrices, which keep their input on an NPU even if they are frozen.
    kept += pack * (trained or setting.kernels == "npu") + trained * (wide * sliced * (q_rank + kv_rank) + output)
    kept += 0 if trained or not core.holds_values or setting.cp_size > 1 else output
    kept += key_value if core.holds_values else 0.0
    down = hidden * (q_rank + kv_rank + rope)
    up = q_input * heads.query * width + kv_rank * heads.key * (attention.nope_head_dim + value)
    out = heads.query * value * hidden
    gathered = wide * tokens * (q_input + kv_rank + rope)
    gradient = setting.weight_gradient(max(out, hidden * (q_rank or heads.query * width))) if trained else 0.0
    return replace(
        _base(setting, "attention"),
        dense=round(down + up + out) + q_rank + kv_rank + hidden,
        kept=kept,
        forward_peak=kept + 2 * pack + 2 * queries + key_value,
        backward_peak=2 * pack + max(core.peak + output, 2 * queries + 2 * key_value + gradient),
        matmul=2 * sliced * down + 2 * tokens * (up + out),
        attention=2 * _pairs(setting) * heads.query * (width + value) / setting.cp_size,
        elementwise=7 * pack + 6 * queries + 4 * key_value,
        sent=Traffic(tp=setting.ring(tp) * (gathered + whole_pack), cp=sent),
    )


def _dense_mlp(setting: Setting) -> Block:
    language, tp = setting.model.language, setting.tp_size
    block = _gated_mlp(setting, language.ffn_hidden_size)
    counts = layers_of(language)[0]
    bias = language.hidden_size * language.mlp_bias  # of the second matrix, on every rank
    return replace(block, dense=_split(counts.dense_mlp, tp, whole=bias) + counts.norms // 2)


def _gated_mlp(setting: Setting, ffn_size: int) -> Block:
    """A norm and a tensor-parallel gated MLP, without the number of parameters."""
    hidden, wide, tokens = setting.model.language.hidden_size, setting.wide, setting.tokens
    trained, ffn = "language" in setting.trained, ffn_size / setting.tp_size
    pack, values = wide * setting.sliced * hidden, wide * tokens * ffn
    forward, backward = gated_activation(setting, tokens, ffn)
    gathered = 0.0 if setting.tp_size == 1 else wide * tokens * hidden
    gradient = setting.weight_gradient(2 * hidden * ffn) if trained else 0.0
    kept = pack + 4 * setting.sliced + 2 * values + trained * (pack + values)
    return replace(
        _base(setting, "mlp"),
        kept=kept,
        forward_peak=pack + 2 * values + pack + max(forward, gathered) + pack,
        backward_peak=2 * pack + gathered + max(backward, gradient + values),
        matmul=6 * tokens * hidden * ffn,
        elementwise=7 * pack + 3 * values,
        sent=Traffic(tp=2 * setting.ring(setting.tp_size) * wide * tokens * hidden),
    )


def _expert_mlp(setting: Setting, experts: ExpertsConfig) -> Block:
    """Router, token dispatch and combine, routed experts, and shared experts."""
    language, wide = setting.model.language, setting.wide
    hidden, ffn, chosen = language.hidden_size, experts.expert_ffn_hidden_size, experts.experts_per_token
    tokens, trained = setting.sliced, "language" in setting.trained
    pack, packs = wide * tokens * hidden, tokens * chosen
    computed = packs * (setting.expert_imbalance if setting.ep_size > 1 else 1.0)
    # Messages of a fixed size have padding rows, which are stored and sent, but not multiplied.
    in_blocks = setting.expert_block_rows
    rows, arrived = (packs, computed) if in_blocks is None else (in_blocks, in_blocks)
    softmax = experts.router == "softmax"
    routing = tokens * (4 * experts.num_experts * (2 if softmax else 1) + 8 + 16 * chosen) + 16 * rows
    returned, exchange = wide * rows * hidden, wide * arrived * hidden
    values = wide * arrived * ffn
    # Trained weights keep their inputs; the sort of exchanged rows on an NPU keeps its input, too.
    is_npu, is_exchanged = setting.kernels == "npu", setting.ep_size > 1
    kept = 2 * pack + 4 * tokens + routing + 2 * values + returned + trained * (exchange + values)
    kept += exchange * (is_npu and is_exchanged)
    padded = 0.0 if in_blocks is None else wide * hidden * in_blocks / chosen  # tokens with those that fill the blocks
    kept += padded * is_npu  # the sort keeps them there
    forward, backward = gated_activation(setting, arrived, ffn)
    sent = 2 * setting.ring(setting.ep_size) * wide * rows * hidden
    counts = layers_of(language)[-1]
    gradient = setting.weight_gradient(2 * hidden * ffn * experts.num_experts / setting.ep_size) if trained else 0.0
    combine = 2 * returned * (0 if is_npu else 2 if wide == 2 else 1)  # sums over the experts of a token are fp32
    learning = exchange + gradient + values
    block = replace(
        _base(setting, "experts"),
        dense=counts.router + hidden,
        experts=counts.experts // setting.ep_size,
        kept=kept,
        routed=kept - 2 * pack,
        forward_peak=kept + 2 * pack + padded + max(combine, forward, exchange),
        backward_peak=2 * pack
        + (
            # Gradients of the returned rows; of the sorted ones; then one weight at a time, when the inputs of both are free.
            max(returned, 2 * exchange - returned, learning - returned - exchange)
            if is_npu and is_exchanged
            else max(combine + exchange, exchange + backward, learning)
        ),
        matmul=2 * tokens * hidden * experts.num_experts + 6 * computed * hidden * ffn,
        elementwise=7 * pack + 8 * wide * rows * hidden + 2 * padded + 3 * wide * arrived * ffn,
        sent=Traffic(ep=sent),
    )
    if not counts.shared_experts:
        return block
    shared = _gated_mlp(setting, counts.shared_experts // (3 * hidden))
    # Its input is the output of the norm, which is already stored for the router.
    shared = replace(
        shared, dense=counts.shared_experts // setting.tp_size, kept=shared.kept - (1 + trained) * pack - 4 * tokens
    )
    return joined("experts", [block, shared])


def _pairs(setting: Setting) -> int:
    return setting.pack.causal_pairs


def _rotary_width(setting: Setting) -> int:
    return setting.model.language.attention.rotary_width


def _split(parameters: int, tp_size: int, whole: int) -> int:
    """Number of parameters of one rank; `whole` of them are not split."""
    return (parameters - whole) // tp_size + whole
