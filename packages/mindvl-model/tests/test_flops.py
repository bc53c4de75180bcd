# SPDX-License-Identifier: Apache-2.0
"""FLOPs of a pack equal those counted by PyTorch when the model runs it, forward and backward."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mindvl_model import MindVLConfig, named_config
from mindvl_model.families.qwen2 import Qwen2Preset
from mindvl_model.flops import pack_flops
from mindvl_model.parameters import PARTS, Part, set_trainable
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3, smallest_llama, smallest_qwen3_moe
from mindvl_ops import Segments, use_backend

pytestmark = pytest.mark.slow

IMAGES = [(1, 6, 10), (1, 4, 4)]  # windows of 4x4 patches: the first is cut unevenly
VIDEOS = [(2, 4, 6)]


def smallest_qwen2() -> MindVLConfig:
    """A very small model with M-RoPE."""
    language = Qwen2Preset(
        hidden_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden_size=40,
        vocab_size=64,
        mrope_sections=(2, 1, 1),
    ).decoder()
    base = smallest_config()
    return MindVLConfig(vision=base.vision, language=language, tokens=base.tokens)


FAMILIES = {
    "qwen2": smallest_qwen2(),
    "qwen3": smallest_config(),
    "qwen3_moe": smallest_qwen3_moe(),
    "deepseek_v3": smallest_deepseek_v3(num_mtp_layers=2),
    "llama": smallest_llama(),
}


def attention_query_by_query(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Attention that multiplies a query only with unmasked keys, so that the counter counts the triangle."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    packs, start = [], 0
    for length in segments.lengths:
        for place in range(start, start + length):
            end = place + 1 if causal else start + length
            seen, values = key[start:end].transpose(0, 1), value[start:end].transpose(0, 1)  # [N, S, D]
            logits = torch.bmm(query[place][:, None], seen.transpose(1, 2)) * scale  # [N, 1, S]
            packs.append(torch.bmm(logits.softmax(dim=-1), values)[:, 0])
        start += length
    return torch.stack(packs)


@pytest.fixture(autouse=True)
def counted_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference operators, whose products are matmuls, with the attention above."""
    from mindvl_model.megatron import spec

    monkeypatch.setattr(spec.ops, "attention", attention_query_by_query)
    with use_backend("reference"):
        yield


def counted(model: Any, pack: dict[str, Any]) -> tuple[int, int]:
    """FLOPs of the executed forward and backward pass."""
    with FlopCounterMode(display=False) as forward:
        loss = model(**pack)
    with FlopCounterMode(display=False) as backward:
        if loss.requires_grad:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def mixed_pack(config: MindVLConfig) -> tuple[dict[str, Any], list[int]]:
    """A pack with images and a video, text, and padding; and the lengths of its segments."""
    segments = [random_segment(config, IMAGES, videos=VIDEOS, seed=1), random_segment(config, num_text=9, seed=2)]
    pack = pack_segments(segments, padding=3) | {"loss_positions": None}
    return pack, [*(len(segment.input_ids) for segment in segments), 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_costs_what_the_counter_of_pytorch_sees(family: str, make_model: Callable[..., Any]) -> None:
    config = FAMILIES[family]
    pack, lengths = mixed_pack(config)
    flops = pack_flops(config, lengths, IMAGES, VIDEOS)
    assert counted(make_model(config), pack) == (flops.forward, flops.backward)


@pytest.mark.parametrize(
    "trainable", [("vision",), ("projector",), ("language",), ("vision", "projector"), ("vision", "language"), ()]
)
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_frozen_parts_have_no_weight_gradients_and_parts_before_the_first_trainable_one_none(
    family: str, trainable: tuple[Part, ...], make_model: Callable[..., Any]
) -> None:
    config = FAMILIES[family]
    pack, lengths = mixed_pack(config)
    model = make_model(config)
    set_trainable(model, trainable)
    flops = pack_flops(config, lengths, IMAGES, VIDEOS, trainable=trainable)
    forward, backward = counted(model, pack)
    if family == "deepseek_v3" and "language" not in trainable and trainable:
        # megatron-core's router product makes the gradient of frozen weights too: 4 layers, hidden size 24, 8 experts.
        backward -= 4 * 2 * sum(lengths) * 24 * 8
    assert (forward, backward) == (flops.forward, flops.backward)


def test_inference_runs_no_multi_token_prediction(make_model: Callable[..., Any]) -> None:
    config = FAMILIES["deepseek_v3"]
    pack, lengths = mixed_pack(config)
    flops = pack_flops(config, lengths, IMAGES, VIDEOS, trainable=(), multi_token=False)
    model = make_model(config)
    set_trainable(model, ())
    with FlopCounterMode(display=False) as counter:
        model.logits(**pack)
    assert counter.get_total_flops() == flops.forward
    assert flops.mtp.total == flops.backward == 0


def test_a_training_step_of_a_dense_model_is_about_six_operations_for_each_parameter_and_token() -> None:
    config = named_config("mindvl-8b")
    tokens = 256
    flops = pack_flops(config, [1] * tokens)  # segments of one token: attention is next to nothing
    matrices = 8_190_735_360 - 151936 * 4096  # the input embedding is looked up
    assert flops.total == pytest.approx(6 * tokens * matrices, rel=1e-3)
    assert (flops.vision.total, flops.projector.total, flops.mtp.total) == (0, 0, 0)
    assert flops.backward == 2 * flops.forward


def test_the_output_layer_is_counted_for_loss_tokens_by_hand() -> None:
    config = smallest_config()
    some, every = pack_flops(config, [10], num_loss_tokens=4), pack_flops(config, [10])
    assert every.forward - some.forward == 2 * (10 - 4) * config.language.hidden_size * 64
    assert every.total - some.total == 3 * (every.forward - some.forward)


def test_attention_grows_with_the_square_of_a_segment_by_hand() -> None:
    config = smallest_config()  # two layers, four heads of eight
    split, whole = pack_flops(config, [3, 3], trainable=()), pack_flops(config, [6], trainable=())
    assert whole.forward - split.forward == 2 * (4 * 4 * 8) * (21 - 6 - 6)
    assert whole.as_dict()["total"] == json.loads(json.dumps(whole.as_dict()))["total"] == whole.forward
    assert set(PARTS) | {"mtp", "forward", "backward", "total"} == set(whole.as_dict())
