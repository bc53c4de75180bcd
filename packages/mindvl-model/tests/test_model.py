# SPDX-License-Identifier: Apache-2.0
"""The whole model: packing does not change results, segments are independent, every parameter has a gradient."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mindvl_model import ModelError
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import smallest_config
from mindvl_ops import use_backend

CONFIG = smallest_config()


def three_segments() -> list[Any]:
    return [
        random_segment(CONFIG, [(1, 4, 6), (1, 6, 2)], seed=1),
        random_segment(CONFIG, num_text=9, seed=2),
        random_segment(CONFIG, [(1, 10, 6)], seed=3, videos=[(2, 4, 2)]),
    ]


def test_a_pack_gives_the_loss_and_gradients_of_its_segments_run_alone(make_model: Callable[..., Any]) -> None:
    model, segments = make_model(CONFIG), three_segments()
    packed = model(**pack_segments(segments, padding=5))
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses = []
    for segment in segments:
        loss = model(**pack_segments([segment]))
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(packed.detach(), torch.stack(losses).sum(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert scale > 0, name
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-5 * scale, name


def test_losses_per_segment_are_kept_until_they_are_taken(make_model: Callable[..., Any]) -> None:
    model, segments = make_model(CONFIG), three_segments()
    with torch.no_grad():
        alone = [model(**pack_segments([segment])) for segment in segments]
    packs = [pack_segments(segments, padding=5), pack_segments(segments[1:])]
    for pack in packs:
        model(**pack)
    first, second = model.take_segment_losses()
    assert model.take_segment_losses() == []
    num_loss_tokens = [int((segment.labels != -100).sum()) for segment in segments]
    assert first[1].tolist() == [*num_loss_tokens, 0]
    assert second[1].tolist() == num_loss_tokens[1:]
    torch.testing.assert_close(first[0], torch.stack([*alone, torch.zeros(())]), rtol=1e-5, atol=0)
    torch.testing.assert_close(second[0], torch.stack(alone[1:]), rtol=1e-5, atol=0)


def test_the_loss_is_summed_over_loss_tokens_only(make_model: Callable[..., Any]) -> None:
    model, pack = make_model(CONFIG), pack_segments(three_segments(), padding=4)
    logits = model.logits(**pack).double()
    has_label = pack["labels"] != -100
    chosen = logits[has_label].gather(1, pack["labels"][has_label, None]).squeeze(1)
    by_hand = (logits[has_label].exp().sum(1).log() - chosen).sum()
    torch.testing.assert_close(model(**pack).double(), by_hand, rtol=1e-6, atol=0)


@torch.no_grad()
def test_a_changed_segment_does_not_affect_other_segments(make_model: Callable[..., Any]) -> None:
    model, (before, text, after) = make_model(CONFIG), three_segments()
    start = len(before.input_ids)
    text.input_ids[:] = 63  # a token that no other segment holds
    for other in (before, after):
        other.input_ids[other.input_ids == 63] = 62
    healthy = model.logits(**pack_segments([before, text, after]))
    model.language.embedding.word_embeddings.weight[63] = float("nan")
    poisoned = model.logits(**pack_segments([before, text, after]))
    assert poisoned[start : start + 9].isnan().all()
    assert torch.equal(poisoned[:start], healthy[:start])
    assert torch.equal(poisoned[start + 9 :], healthy[start + 9 :])


@torch.no_grad()
def test_an_image_does_not_affect_other_segments(make_model: Callable[..., Any]) -> None:
    model, (first, _, last) = make_model(CONFIG), three_segments()
    before = model.logits(**pack_segments([first, last]))
    last.pixel_values.copy_(255 - last.pixel_values)
    after = model.logits(**pack_segments([first, last]))
    start = len(first.input_ids)
    assert torch.equal(before[:start], after[:start])
    assert not torch.allclose(before[start:], after[start:])


def test_a_text_only_pack_gives_every_vision_parameter_a_zero_gradient(make_model: Callable[..., Any]) -> None:
    model = make_model(CONFIG)
    model(**pack_segments([random_segment(CONFIG, num_text=9)])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == name.startswith("language"), name


def test_a_pack_without_loss_tokens_gives_zero_gradients(make_model: Callable[..., Any]) -> None:
    model, pack = make_model(CONFIG), pack_segments(three_segments())
    pack["labels"][:] = -100
    pack["loss_positions"] = torch.tensor([], dtype=torch.int64)
    loss = model(**pack)
    loss.backward()
    assert loss.item() == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_placeholders_without_their_visual_tokens_are_refused(make_model: Callable[..., Any]) -> None:
    pack = pack_segments([random_segment(CONFIG, [(1, 4, 6)])])  # 6 visual tokens
    pack["input_ids"][pack["input_ids"] == CONFIG.tokens.image] = 9
    with pytest.raises(ModelError, match="0 image placeholders for 6 visual tokens"):
        make_model(CONFIG)(**pack)


def test_a_video_needs_a_video_token(make_model: Callable[..., Any]) -> None:
    pack = pack_segments([random_segment(CONFIG, videos=[(2, 4, 6)])])
    images_only = replace(CONFIG, tokens=replace(CONFIG.tokens, video=None))
    with pytest.raises(ModelError, match=r"contains a video, but tokens\.video of the model is not set"):
        make_model(images_only)(**pack)


def test_visual_tokens_of_several_images_come_in_input_order(make_model: Callable[..., Any]) -> None:
    model = make_model(CONFIG)
    one, two = (random_segment(CONFIG, [grid], seed=grid[1]) for grid in ((1, 6, 8), (1, 4, 10)))
    both, _ = model.encode_media(
        torch.cat((one.pixel_values, two.pixel_values)), torch.cat((one.image_grid_thw, two.image_grid_thw))
    )
    alone = [model.encode_media(each.pixel_values, each.image_grid_thw)[0] for each in (one, two)]
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32(make_model: Callable[..., Any]) -> None:
    pack = pack_segments(three_segments())
    exact = make_model(CONFIG)(**pack)
    rounded = make_model(CONFIG, dtype=torch.bfloat16)(**pack)
    assert rounded.dtype == torch.float32
    assert abs(rounded - exact) <= 0.02 * exact


def test_on_the_simulated_npu_the_model_is_the_same_and_no_layer_waits_for_the_device(
    make_model: Callable[..., Any], fake_npu: Any
) -> None:
    pack = pack_segments(three_segments(), padding=5)
    syncs = []
    for num_layers in (2, 4):
        model = make_model(replace(CONFIG, language=replace(CONFIG.language, num_layers=num_layers)))
        expected = model(**pack)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        fake_npu.syncs.clear()
        fake_npu.calls.clear()
        with use_backend("npu"):
            actual = model(**pack)
            actual.backward()
        syncs.append(list(fake_npu.syncs))
        causal = [call for call in fake_npu.calls if call.arguments.get("sparse_mode") == 2]
        assert len(causal) == num_layers
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert (parameter.grad - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name
    assert syncs[0] == syncs[1]  # grids, segment bounds and positions of visual tokens, once per pack
    assert syncs[0].count("tolist") == 4  # bounds twice, for attention and for losses by segment


def test_recomputed_activations_are_not_stored() -> None:
    """Bytes that autograd stores for one forward pass, which decrease with every recomputed layer."""
    from mindvl_model.model import MindVLModel
    from mindvl_model.parallel_config import BuildConfig, RecomputeConfig
    from mindvl_model.testing.tiny import randomize

    def bytes_kept(**recompute: Any) -> int:
        model, sizes = MindVLModel(CONFIG, BuildConfig(recompute=RecomputeConfig(**recompute))), []
        randomize(model)

        def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
            model(**pack_segments(three_segments()))
        return sum(sizes)

    everything, full = bytes_kept(), bytes_kept(kind="full")
    assert bytes_kept(kind="selective") < everything
    assert full < bytes_kept(kind="full", layers=1) < everything
    assert full < 0.5 * everything
