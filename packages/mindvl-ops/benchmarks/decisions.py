# SPDX-License-Identifier: Apache-2.0
"""Time what the torch backend could call for each operator, forward and backward: the table of docs/design/operators.md.

One thread, processor time on a CPU, medians of rounds in which all candidates run in turn. Attention has its own script
beside this one. Run: python packages/mindvl-ops/benchmarks/decisions.py [--dtype bfloat16] [--rounds N]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_ops import use_backend
from mindvl_ops.backend import chosen

Way = Callable[[], object]
EXPERTS = 8


def main() -> None:
    """Print one table in Markdown; the first candidate is what the torch backend does, the ratios are to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| operator | chosen | others, time over that of the chosen |\n|---|---|---|")
    for operator, ways in decisions(getattr(torch, arguments.dtype)):
        times = in_turn(ways, arguments.rounds)
        (first, mine), *others = times.items()
        ratios = ", ".join(f"{name} {seconds / mine:.2f}" for name, seconds in others)
        print(f"| {operator} | {first}: {mine * 1e3:.2f} ms | {ratios} |", flush=True)


def in_turn(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Median seconds of each way after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def trained(operator: str, inputs: list[Tensor], *constants: object, **others: Callable[..., Tensor]) -> dict[str, Way]:
    """Ours, the reference and the others on the same inputs, each with gradients for all of them."""
    leaves = [x.requires_grad_() for x in inputs]

    def run(function: Callable[..., object]) -> None:
        output = function(*leaves, *constants)
        output = output[0] if isinstance(output, tuple) else output
        assert isinstance(output, Tensor)
        torch.autograd.grad(output, leaves, torch.ones_like(output))

    def reference() -> None:
        with use_backend("reference"):
            run(chosen(operator))

    ways: dict[str, Way] = {"ours": lambda: run(chosen(operator)), "reference": reference}
    return ways | {name.replace("_", " "): lambda f=function: run(f) for name, function in others.items()}


def decisions(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Way]]]:
    """Operator and its candidates, ours first."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    yield "rms_norm [2048, 1024]", trained(
        "rms_norm", [normal(2048, 1024), normal(1024)], 1e-6,
        functional_rms_norm=lambda x, w, eps: F.rms_norm(x, w.shape, w, eps),
    )  # fmt: skip
    angle = torch.rand(2048, 64)
    yield "rotary [2048, 8, 64]", trained("rotary", [normal(2048, 8, 64)], angle.cos(), angle.sin())
    yield (
        "swiglu [2048, 2 x 1024]",
        trained(
            "swiglu", [normal(2048, 2048)], chunk_silu_product=lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
        ),
    )
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool).triu(1)
    yield (
        "scaled_masked_softmax [1, 8, 512, 512]",
        trained("scaled_masked_softmax", [normal(1, 8, 512, 512)], mask, 0.5),
    )
    labels = torch.randint(0, 32000, (256,))
    yield "cross_entropy [256, 32000]", trained(
        "cross_entropy", [normal(256, 32000)], labels,
        functional_cross_entropy=lambda x, y: F.cross_entropy(x, y, reduction="none"),
        in_float32=lambda x, y: F.cross_entropy(x.float(), y, reduction="none"),
    )  # fmt: skip
    yield "linear_cross_entropy [256, 256] x [32000, 256]", trained(
        "linear_cross_entropy", [normal(256, 256), normal(32000, 256)], labels,
        product_then_loss=lambda h, w, y: F.cross_entropy((h @ w.T).float(), y, reduction="none"),
    )  # fmt: skip
    yield from _experts(dtype, normal)
    yield from _optimizers(normal)


def _experts(dtype: torch.dtype, normal: Callable[..., Tensor]) -> Iterator[tuple[str, dict[str, Way]]]:
    experts = torch.rand(2048, EXPERTS).argsort(dim=1)[:, :2]
    order = experts.flatten().argsort(stable=True)
    slots = order.argsort().int()
    sizes = torch.bincount(experts.flatten(), minlength=EXPERTS)
    ends = sizes.cumsum(0).to(torch.int32)
    yield "moe_permute [2048, 512], 2 of 8", trained("moe_permute", [normal(2048, 512)], experts)
    yield (
        "moe_unpermute [4096, 512]",
        trained("moe_unpermute", [normal(4096, 512)], slots, torch.rand(2048, 2).to(dtype)),
    )

    def kernel(x: Tensor, weight: Tensor, _: object) -> Tensor:
        product: Tensor = torch._grouped_mm(x, weight, offs=ends)
        return product

    yield (
        "grouped_matmul [4096, 256] x [8, 256, 512]",
        trained(
            "grouped_matmul", [normal(4096, 256), normal(EXPERTS, 256, 512)], sizes.tolist(), torch_grouped_mm=kernel
        ),
    )


def _optimizers(normal: Callable[..., Tensor]) -> Iterator[tuple[str, dict[str, Way]]]:
    shapes = [(512, 512)] * 16 + [(512,)] * 64
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def of_ours(backend: str) -> Way:
        params, grads, first, second = ([normal(*shape).abs() for shape in shapes] for _ in range(4))

        def step() -> None:
            with use_backend(backend), torch.no_grad():  # type: ignore[arg-type]
                chosen("adamw")(params, grads, first, second, step=3, decoupled=True, bias_correction=True, **settings)

        return step

    def of_torch(**options: bool) -> Way:
        params = [torch.nn.Parameter(normal(*shape)) for shape in shapes]
        for param in params:
            param.grad = normal(*param.shape)
        return torch.optim.AdamW(params, **settings, **options).step  # type: ignore[arg-type]

    yield (
        "adamw, 80 parameters, 4.2 M values",
        {
            "ours": of_ours("torch"),
            "reference": of_ours("reference"),
            "torch foreach": of_torch(foreach=True),
            "torch loop": of_torch(foreach=False),
        },
    )


if __name__ == "__main__":
    main()
