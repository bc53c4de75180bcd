# SPDX-License-Identifier: Apache-2.0
"""Gradient buffers, optimizer, schedule and tensors of a checkpoint, each alone."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindvl_model import MindVLConfig, MindVLModel, set_up_device
from mindvl_model.parameters import set_trainable
from mindvl_model.random_inputs import pack_segments, random_segment
from mindvl_model.testing.tiny import randomize, smallest_config, smallest_deepseek_v3, smallest_qwen3_moe
from mindvl_train import OptimizerConfig

CONFIG = smallest_config()


@pytest.fixture
def model() -> Iterator[MindVLModel]:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.parallel_state import process_groups

    with process_groups(set_up_device(), seed=0):
        built = MindVLModel(CONFIG, BuildConfig())
        randomize(built)
        yield built


def test_the_optimizer_holds_what_is_trained_and_nothing_else(model: MindVLModel) -> None:
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models

    set_trainable(model, ["projector"])
    optimizer = build_optimizer(wrap_models([model]), OptimizerConfig())
    held = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    assert held == sum(parameter.numel() for parameter in model.projector.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [smallest_config, smallest_qwen3_moe, smallest_deepseek_v3])
def test_with_overlap_every_parameter_is_waited_for_before_it_is_read(make: Callable[[], MindVLConfig]) -> None:
    """megatron-core waits when the module of a parameter is called: none may be read without that."""
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.megatron.optimizer import wrap_models
    from mindvl_train.parallel_state import process_groups

    with process_groups(set_up_device(), seed=0):
        config = make()
        model = MindVLModel(config, BuildConfig())
        randomize(model)
        wrapped: Any = wrap_models([model], overlap=True)[0]
        waited: set[torch.nn.Parameter] = set()
        for parameter, group in wrapped.param_to_bucket_group.items():
            wrapped.param_to_bucket_group[parameter] = Waiter(parameter, waited, group)
        wrapped(**pack_segments([random_segment(config, [(1, 4, 6)], seed=1)]))
        assert {name for name, parameter in model.named_parameters() if parameter not in waited} == set()


class Waiter:
    """Stands where gathered parameters are waited for, and notes which one it was."""

    def __init__(self, parameter: torch.nn.Parameter, waited: set[torch.nn.Parameter], group: Any) -> None:
        self.parameter, self.waited, self.group = parameter, waited, group

    def finish_param_sync(self, **options: Any) -> None:
        self.waited.add(self.parameter)
        self.group.finish_param_sync(**options)


def test_vectors_are_not_decayed_and_matrices_are(model: MindVLModel) -> None:
    from mindvl_train.megatron.optimizer import build_optimizer, squared_norm, update, wrap_models

    wrapped = wrap_models([model])
    optimizer = build_optimizer(wrapped, OptimizerConfig(weight_decay=0.5, clip_grad_norm=0.0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wrapped[0].zero_grad_buffer()  # type: ignore[operator]
    norm = float(squared_norm(optimizer)) ** 0.5
    assert norm == 0.0
    update(optimizer, 0.1, norm)  # without gradients only decay is left
    for name, parameter in model.named_parameters():
        kept = 1.0 if parameter.ndim == 1 else 1 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * kept, msg=lambda text, n=name: f"{n}: {text}")


def test_a_chunk_without_layers_has_no_part_norms(model: MindVLModel) -> None:
    """pp_size=2 with virtual_stages=2 leaves such chunks in a model of two layers."""
    from mindvl_train.megatron.optimizer import build_optimizer, squared_norm, wrap_models
    from mindvl_train.megatron.part_norms import squared_norms

    wrapped = wrap_models([model])
    optimizer = build_optimizer(wrapped, OptimizerConfig())
    wrapped[0].zero_grad_buffer()  # type: ignore[operator]
    squared_norm(optimizer)
    assert squared_norms(optimizer, [torch.nn.Identity(), *wrapped]).tolist() == [0.0, 0.0, 0.0]


def test_a_rank_without_trained_parameters_has_no_part_norms(model: MindVLModel) -> None:
    """The warm-up trains the projector alone, which is on the first stage."""
    from mindvl_train.megatron.optimizer import build_optimizer, squared_norm, update, wrap_models
    from mindvl_train.megatron.part_norms import squared_norms

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    wrapped = wrap_models([model])
    optimizer = build_optimizer(wrapped, OptimizerConfig())
    wrapped[0].zero_grad_buffer()  # type: ignore[operator]
    assert float(squared_norm(optimizer)) == 0.0
    update(optimizer, 0.1, 0.0)
    assert squared_norms(optimizer, wrapped).tolist() == [0.0, 0.0, 0.0]


def test_tensors_come_back_into_another_model(model: MindVLModel, tmp_path: Path) -> None:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.megatron.checkpoint import owned_pieces, unwrap, wanted_pieces
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.tensor_files import ChunkWriter, TensorReader, write_index

    wrapped = wrap_models([model])
    assert unwrap(wrapped[0]) is model
    optimizer = build_optimizer(wrapped, OptimizerConfig())
    wrapped[0].zero_grad_buffer()  # type: ignore[operator]
    optimizer.step()
    with ChunkWriter(tmp_path) as writer:
        for piece in owned_pieces(wrapped, optimizer):
            writer.add(piece)
    write_index(tmp_path, writer.chunks)
    other: Any = MindVLModel(CONFIG, BuildConfig())
    randomize(other, seed=8)
    TensorReader(tmp_path).fill(wanted_pieces([other], None))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_before_the_first_update_as_much_is_saved_as_will_be_wanted(model: MindVLModel) -> None:
    from mindvl_train.megatron.checkpoint import owned_pieces, wanted_pieces
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models

    wrapped = wrap_models([model])
    optimizer = build_optimizer(wrapped, OptimizerConfig())
    saved = {(piece.key, piece.offset) for piece in owned_pieces(wrapped, optimizer)}
    assert any("exp_avg" in key for key, _ in saved)
    assert saved == {(piece.key, piece.offset) for piece in wanted_pieces(wrapped, optimizer)}


def test_megatrons_own_loader_reads_the_weights(model: MindVLModel, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    from mindvl_train.megatron.checkpoint import owned_pieces, wanted_pieces
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.megatron.tensor_files import ChunkWriter, write_index

    pieces = wanted_pieces([model], None)
    before = [piece.content.clone() for piece in pieces]
    wrapped = wrap_models([model])
    with ChunkWriter(tmp_path) as writer:
        for piece in owned_pieces(wrapped, build_optimizer(wrapped, OptimizerConfig())):
            writer.add(piece)
    write_index(tmp_path, writer.chunks)
    randomize(model, seed=8)
    entries: dict[str, Any] = {
        name: entry for name, entry in model.sharded_state_dict().items() if "_extra_state" not in name
    }
    model.load_state_dict(dist_checkpointing.load(entries, str(tmp_path)))
    for piece, content in zip(wanted_pieces([model], None), before, strict=True):
        assert torch.equal(piece.content, content), piece.key


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 1, 5, 2), (2, 3, 4)])
def test_every_flat_stretch_of_an_array_is_boxes_in_order(shape: tuple[int, ...]) -> None:
    from mindvl_train.megatron.checkpoint import boxes

    count = math.prod(shape)
    numbers = torch.arange(count).reshape(shape)
    for start in range(count + 1):
        for end in range(start, count + 1):
            found = [
                numbers[tuple(slice(a, a + b) for a, b in zip(offset, size, strict=True))].flatten()
                for offset, size in boxes(shape, start, end)
            ]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, end))
            assert len(found) < 2 * max(len(shape), 1)
