# SPDX-License-Identifier: Apache-2.0
"""AdamW: optimizer with the contract that megatron-core expects, over one update operator.

megatron-core wants the shape of Apex's and TransformerEngine's FusedAdam: `step` as an int in each parameter group
and only `exp_avg` and `exp_avg_sq` in the state of a parameter. torch's own AdamW keeps `step` in the state, and the
distributed optimizer then cannot load its checkpoint. Source: Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .backend import chosen
from .errors import OpsError
from .registry import register

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SLAB_ELEMENTS = 1 << 25  # parameters whose moments are on the device at once: 256 MiB of float32


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    Args:
        adam_w_mode: Decoupled decay if True, else the decay is added to the gradient (plain Adam).
        bias_correction: Divide the moments by `1 - beta ** step`.
        host_state: Keep the moments in the memory of the host, pinned where there is a device, and bring them to the
            device a slab at a time for the update. Two float32 numbers for each parameter that a device need not hold;
            every step sends them there and back.
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
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay} is out of range. AdamW. "
                "Use non-negative values and 0 <= beta < 1."
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
                self._update_by_slabs(group, params)
            elif params:
                moments = {name: [self.state[param][name] for param in params] for name in _MOMENTS}
                self._update(group, params, moments)
        return loss

    def initialize_state(self, param: Tensor) -> None:
        """Make room for the moments of a parameter, zero, where they are kept; nothing where there are some."""
        state = self.state[param]
        for name in _MOMENTS:
            if name not in state:
                state[name] = self._on_host(param).zero_() if self.host_state else torch.zeros_like(param)

    @staticmethod
    def _on_host(like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=like.device.type != "cpu")

    def _update_by_slabs(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for slab in _slabs(params):
            moments = {
                name: [self.state[param][name].to(param.device, non_blocking=True) for param in slab]
                for name in _MOMENTS
            }
            self._update(group, slab, moments)
            for name, values in moments.items():
                for param, value in zip(slab, values, strict=True):
                    kept = self.state[param][name]
                    if kept.device.type != "cpu":  # somebody loaded a state to the device
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


def _slabs(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters in order, in groups of so many elements at most, or of one parameter."""
    slab: list[Tensor] = []
    for param in params:
        if slab and sum(p.numel() for p in slab) + param.numel() > _SLAB_ELEMENTS:
            yield slab
            slab = []
        slab.append(param)
    if slab:
        yield slab


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
