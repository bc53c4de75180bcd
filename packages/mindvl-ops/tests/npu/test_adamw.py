# SPDX-License-Identifier: Apache-2.0
"""The NPU update equals the reference over several steps, whatever is switched on; it wants one type."""

import pytest
import torch

from mindvl_ops import AdamW, OpsError, use_backend


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_the_kernel_equals_the_reference(fake_npu, adam_w_mode, bias_correction):
    results = []
    for backend in ("reference", "npu"):
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
    for reference, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, reference, rtol=1e-5, atol=1e-6)


def test_the_powers_of_beta_are_those_of_the_step_before(fake_npu):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([param], betas=(0.9, 0.99))
    with use_backend("npu"):
        for _ in range(3):
            param.grad = torch.ones(2)
            optimizer.step()
    powers = [(call.arguments["beta1_power"], call.arguments["beta2_power"]) for call in fake_npu.calls]
    assert powers == [(0.9**step, 0.99**step) for step in range(3)]


def test_a_gradient_of_another_type_is_refused(fake_npu):
    from mindvl_ops.npu.adamw import adamw_npu

    one, half = torch.ones(2), torch.ones(2).bfloat16()
    with pytest.raises(OpsError, match=r"gradient torch\.bfloat16"):
        adamw_npu(
            [one], [half], [one], [one], step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, decoupled=True,
            bias_correction=True,
        )  # fmt: skip
