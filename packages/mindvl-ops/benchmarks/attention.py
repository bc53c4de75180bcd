# SPDX-License-Identifier: Apache-2.0
"""Time packed attention, forward and backward, against a loop over segments and against one block-diagonal mask.

On a CPU processor time, else the time by the clock; medians.

Run: python packages/mindvl-ops/benchmarks/attention.py [--threads N] [--device cpu|cuda] [--dtype float32|bfloat16]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_ops import Segments, attention

HEADS, WIDTH = 4, 32


def main() -> None:
    """Print one line per layout: milliseconds of each way, and how often ours is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    layouts = {
        "40 segments of 10-60, causal": (torch.randint(10, 61, (40,), generator=generator).tolist(), True),
        "60 images of 48, full": ([48] * 60, False),
        "60 images of 24-96, full": (torch.randint(6, 25, (60,), generator=generator).mul(4).tolist(), False),
        "one segment of 2048, causal": ([2048], True),
    }
    for name, (lengths, causal) in layouts.items():
        times = measure(lengths, causal, arguments)
        ours = times.pop("ours")
        others = ", ".join(f"{other} {ms:.2f} ms ({ms / ours:.1f}x)" for other, ms in times.items())
        print(f"{name}: ours {ours:.2f} ms, {others}")


def measure(lengths: list[int], causal: bool, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a forward and backward pass, median of several, by way."""
    options = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype), "requires_grad": True}
    qkv = [torch.randn(sum(lengths), HEADS, WIDTH, **options) for _ in range(3)]
    segments = Segments(lengths)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    keep = owner[:, None] == owner[None, :]
    keep = (keep.tril() if causal else keep).to(arguments.device)

    def ours() -> Tensor:
        return attention(*qkv, segments, causal=causal)

    def loop() -> Tensor:
        pieces = zip(*(x.split(lengths) for x in qkv), strict=True)
        return torch.cat([_sdpa(q, k, v, is_causal=causal) for q, k, v in pieces])

    def block_mask() -> Tensor:
        return _sdpa(*qkv, attn_mask=keep)

    torch.testing.assert_close(ours(), loop(), atol=3e-2, rtol=3e-2)
    ways = {"ours": ours, "loop over segments": loop, "block-diagonal mask": block_mask}
    return _medians(ways, qkv, arguments)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, **options)[0].transpose(0, 1)  # type: ignore[arg-type]


def _medians(
    ways: dict[str, Callable[[], Tensor]], qkv: list[Tensor], arguments: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of each way; all ways take turns, so that other load of the machine meets every one of them."""
    grad, on_cpu = torch.randn_like(qkv[0]), arguments.device == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats + 1):
        for name, way in ways.items():
            start = clock()
            torch.autograd.grad(way(), qkv, grad)
            if not on_cpu:
                torch.accelerator.synchronize()
            found[name].append((clock() - start) * 1e3)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


if __name__ == "__main__":
    main()
