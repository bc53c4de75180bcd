# SPDX-License-Identifier: Apache-2.0
"""Forward and backward over the microbatches of one step, by megatron-core's schedule."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from mindvl_train.interfaces import Batch


def forward_backward(model: torch.nn.Module, microbatches: list[Batch]) -> Tensor:
    """Run all microbatches and leave their gradients reduced; returns the summed loss of this rank.

    Gradients are sums over learned tokens, divided once by their global count (megatron's per-token loss).
    """

    def forward_step(batches: Iterator[Batch], stage: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(batches)
        loss_sum = stage(**batch.model_inputs())

        def report(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            count = torch.tensor(batch.num_label_tokens, dtype=torch.int, device=output.device)
            return output, count, {"loss_sum": output.detach()}

        return loss_sum, report

    schedule = get_forward_backward_func()
    reports = schedule(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=microbatches[0].model_inputs()["input_ids"].shape[0],
        micro_batch_size=1,
    )
    return torch.stack([report["loss_sum"] for report in reports]).sum()


def finish_router_step(model: torch.nn.Module) -> None:
    """Let routers of experts take the load of the step they have seen; call once after every update, on every rank."""
    inner: Any = unwrap_model(model)
    inner.finish_router_step()
