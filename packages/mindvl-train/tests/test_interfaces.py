# SPDX-License-Identifier: Apache-2.0
"""The real loader and the real model are what training asks for."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mindvl_data import Batch as DataBatch
from mindvl_data import Loader
from mindvl_model import MindVLModel, set_up_device
from mindvl_model.testing.tiny import randomize, smallest_config
from mindvl_train import RunConfig
from mindvl_train.interfaces import Batch, BatchSource

if TYPE_CHECKING:  # a type checker compares every signature

    def _match(loader: Loader, batch: DataBatch) -> tuple[BatchSource, Batch]:
        return loader, batch


def members(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_") or name == "__next__"}


def test_the_loader_gives_packs_and_a_state_that_json_holds(make_config: Callable[..., RunConfig]) -> None:
    with Loader(make_config().data, global_batch_size=2, position_kind="rope") as loader:
        assert all(hasattr(loader, name) for name in members(BatchSource))
        first, second = next(loader), next(loader)
        assert all(hasattr(first, name) for name in members(Batch))
        state = json.loads(json.dumps(loader.state_dict()))
        third = next(loader)
    with Loader(make_config().data, global_batch_size=2, position_kind="rope") as again:
        again.load_state_dict(state)
        assert torch.equal(next(again).input_ids, third.input_ids)
    assert second.num_loss_tokens == int((second.labels != -100).sum())


def test_the_model_takes_what_the_loader_gives(make_config: Callable[..., RunConfig]) -> None:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train.parallel_state import process_groups

    with (
        Loader(make_config().data, global_batch_size=1, position_kind="rope") as loader,
        process_groups(set_up_device(), seed=0) as ranks,
    ):
        model = MindVLModel(smallest_config(vocab_size=264), BuildConfig())
        randomize(model)
        loss = model(**next(loader).to(ranks.device).model_inputs())
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.requires_grad
