# SPDX-License-Identifier: Apache-2.0
"""The fused update equals the reference update over several steps."""

import pytest
import torch

from mindvl_ops import AdamW, use_backend


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_fused_equals_reference(adam_w_mode, bias_correction):
    results = []
    for backend in ("reference", "torch"):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((3, 4), (5,))]
        optimizer = AdamW(
            params, lr=0.1, weight_decay=0.1, adam_w_mode=adam_w_mode, bias_correction=bias_correction, eps=1e-6
        )
        with use_backend(backend):
            for _ in range(5):
                for param in params:
                    param.grad = torch.randn(param.shape, generator=generator)
                optimizer.step()
        results.append(params)
    for reference, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, reference, rtol=1e-5, atol=1e-6)
