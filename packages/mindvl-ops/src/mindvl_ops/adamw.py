# SPDX-License-Identifier: Apache-2.0
"""AdamW: optimizer with the contract that megatron-core expects, over one update operator.

megatron-core expects the interface of Apex's and TransformerEngine's FusedAdam: `step` as an int in each parameter group
and only `exp_avg` and `exp_avg_sq` in the state of a parameter. torch's own AdamW keeps `step` in the state, and the
distributed optimizer then cannot load its checkpoint. Source: Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .backend import chosen
from .cases import Case, Inputs, case_of, joined
from .errors import OpsError
from .registry import register

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK_ELEMENTS = 1 << 25  # parameters whose moments are on the device at once: 256 MiB of float32


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    Args:
        adam_w_mode: Decoupled decay if True, else the decay is added to the gradient (plain Adam).
        bias_correction: Divide the moments by `1 - beta ** step`.
        host_state: Keep the moments in host memory, pinned where there is a device, and stream them to the device in
            chunks of 32M parameters for the update. This saves two float32 values per parameter of device memory and
            costs one copy in each direction per step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        host_state: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise OpsError(
                f"AdamW: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay} is out of range. Use "
                "non-negative values and 0 <= beta < 1."
            )
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = bool(adam_w_mode)
        self.host_state = host_state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; counts the step of each group, in the group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            for param in params:
                self.initialize_state(param)
            if self.host_state:
                self._update_in_chunks(group, params)
            elif params:
                moments = {name: [self.state[param][name] for param in params] for name in _MOMENTS}
                self._update(group, params, moments)
        return loss

    def initialize_state(self, param: Tensor) -> None:
        """Allocate the moments of a parameter as zeros where they are kept; keep existing ones."""
        state = self.state[param]
        for name in _MOMENTS:
            if name not in state:
                state[name] = self._on_host(param).zero_() if self.host_state else torch.zeros_like(param)

    @staticmethod
    def _on_host(like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=like.device.type != "cpu")

    def _update_in_chunks(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for chunk in _chunks(params):
            moments = {
                name: [self.state[param][name].to(param.device, non_blocking=True) for param in chunk]
                for name in _MOMENTS
            }
            self._update(group, chunk, moments)
            for name, values in moments.items():
                for param, value in zip(chunk, values, strict=True):
                    kept = self.state[param][name]
                    if kept.device.type != "cpu":  # a state was loaded onto the device
                        kept = self.state[param][name] = self._on_host(param)
                    if kept is not value:
                        kept.copy_(value)

    def _update(self, group: dict[str, Any], params: list[Tensor], moments: dict[str, list[Tensor]]) -> None:
        chosen("adamw")(
            params,
            [param.grad for param in params],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            step=group["step"],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.adam_w_mode,
            bias_correction=group["bias_correction"],
        )


def _chunks(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in order, in groups of at most _CHUNK_ELEMENTS elements or of one larger parameter."""
    chunk: list[Tensor] = []
    for param in params:
        if chunk and sum(p.numel() for p in chunk) + param.numel() > _CHUNK_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(param)
    if chunk:
        yield chunk


@register("adamw", "reference")
def adamw_reference(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """The paper's algorithm 2, one parameter at a time; `params`, `exp_avgs` and `exp_avg_sqs` are changed in place."""
    beta1, beta2 = betas
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        else:
            grad = grad + weight_decay * param
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).add_(grad.square(), alpha=1 - beta2)
        param.sub_(lr * (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + eps))


@case_of("adamw")
def _case(inputs: Inputs) -> Case:
    shape = (4 * inputs.tokens, inputs.tokens)
    return Case(_case_step, (inputs.normal(*shape), inputs.normal(*shape)), trains=False)


@torch.no_grad()
def _case_step(param: Tensor, grad: Tensor) -> Tensor:
    param, first, second = param.clone(), grad * 0.1, grad.square() * 0.1
    chosen("adamw")(
        [param], [grad], [first], [second],
        step=3, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=True, bias_correction=True,
    )  # fmt: skip
    return joined((param, first, second))
