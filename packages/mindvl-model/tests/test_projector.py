# SPDX-License-Identifier: Apache-2.0
"""The projector equals the patch merger of transformers."""

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPatchMerger

from mindvl_model.testing.tiny import randomize, smallest_config


def test_the_projector_is_the_merger_of_transformers() -> None:
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.projector import Projector

    projector = Projector(smallest_config().vision, 24, BuildConfig())
    randomize(projector)
    merger = Qwen2_5_VLPatchMerger(dim=24, context_dim=16, spatial_merge_size=2)
    pairs = {"ln_q": projector.norm, "mlp.0": projector.fc1, "mlp.2": projector.fc2}
    with torch.no_grad():
        for name, linear in pairs.items():
            for kind, parameter in merger.get_submodule(name).named_parameters():
                parameter.copy_(getattr(linear, kind))
    hidden = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    actual, expected = projector(hidden), merger(hidden)
    assert actual.shape == (3, 24)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    actual.square().sum().backward()
    expected.square().sum().backward()
    for name, linear in pairs.items():
        for kind, parameter in merger.get_submodule(name).named_parameters():
            torch.testing.assert_close(getattr(linear, kind).grad, parameter.grad, rtol=1e-4, atol=1e-5)
