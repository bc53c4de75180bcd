# SPDX-License-Identifier: Apache-2.0
"""Figures of the operators beside their plain rivals: packed attention, patch embedding, token loss, import.

Every figure runs in processes of its own, ours and the rival in turn, so that peak memory is that of one way alone and
other load of the machine meets both. Time is processor time on a CPU. Run: mindvl bench ops, or
python packages/mindvl-ops/benchmarks/ops.py [--quick] [--json]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "mindvl-data" / "benchmarks"))

from figures import Figure, median, print_report

HERE = Path(__file__).parent
MIB = 2**20
VOCABULARY = 151_936


def main() -> None:
    """Measure everything and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller inputs, fewer rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", nargs=2, metavar=("FIGURE", "NAME"), help="one way alone, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(run_way(*arguments.way, quick=arguments.quick)))
        return
    figures = [
        *attention(arguments.quick),
        *patches(arguments.quick),
        *loss(arguments.quick),
        *imports(arguments.quick),
    ]
    print_report(figures, as_json=arguments.json, directory=HERE)


def attention(quick: bool) -> list[Figure]:
    """64 mixed segments in one row against a dense mask over the row."""
    found = measure("attention", ("ours", "dense masked SDPA"), quick)
    note = "64 segments in 2,048 tokens" if quick else "64 segments in 8,192 tokens, 4 heads of 64, float32"
    return both(found, "packed attention", "dense masked SDPA", note, quick, time=10.0, memory=3.0)


def patches(quick: bool) -> list[Figure]:
    """A matmul over flattened patches against Conv3d over the same patches."""
    found = measure("patches", ("ours", "Conv3d"), quick)
    note = f"{512 if quick else 4096} patches of 3 x 2 x 14 x 14 to 1280, float32"
    return both(found, "patch embedding", "Conv3d", note, quick, time=1.0)


def loss(quick: bool) -> list[Figure]:
    """Peak memory of the two losses of ours against the plain one, at the vocabulary of Qwen."""
    found = measure("loss", ("plain", "by rows", "fused with the output layer"), quick)
    note = f"{128 if quick else 1024} tokens, hidden size 128, vocabulary 151,936, float32"
    plain = found["plain"]
    figures = []
    for way, least in (("by rows", 1.3), ("fused with the output layer", 10.0)):
        figures.append(
            Figure(
                name=f"loss {way}: memory saved",
                value=plain["peak"] / found[way]["peak"],
                unit="x plain",
                at_least=None if quick else least,
                note=f"{found[way]['peak'] / MIB:,.0f} MiB against {plain['peak'] / MIB:,.0f}; {note}",
            )
        )
        figures.append(
            Figure(
                name=f"loss {way}: time",
                value=found[way]["seconds"] * 1e3,
                unit="ms",
                rival="plain",
                rival_value=plain["seconds"] * 1e3,
                note="ratio below 1 is faster",
            )
        )
    return figures


def imports(quick: bool) -> list[Figure]:
    """What `import mindvl_ops` adds to torch's own import."""
    code = (
        "import torch, time; start = time.process_time(); import mindvl_ops; print((time.process_time() - start) * 1e3)"
    )
    runs = [
        float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(3 if quick else 9)
    ]
    return [Figure(name="import mindvl_ops, after torch", value=median(runs), unit="ms", at_most=100.0)]


def both(
    found: dict[str, dict[str, float]],
    name: str,
    rival: str,
    note: str,
    quick: bool,
    *,
    time: float,
    memory: float | None = None,
) -> list[Figure]:
    """How often faster ours is, and how often smaller its peak where that has a target."""
    ours, theirs = found["ours"], found[rival]
    figures = [
        Figure(
            name=f"{name}: speed",
            value=theirs["seconds"] / ours["seconds"],
            unit=f"x {rival}",
            at_least=None if quick else time,
            note=f"{ours['seconds'] * 1e3:,.1f} ms against {theirs['seconds'] * 1e3:,.1f}, with backward; {note}",
        )
    ]
    if memory is not None:
        figures.append(
            Figure(
                name=f"{name}: memory saved",
                value=theirs["peak"] / ours["peak"],
                unit=f"x {rival}",
                at_least=None if quick else memory,
                note=f"peak {ours['peak'] / MIB:,.0f} MiB against {theirs['peak'] / MIB:,.0f}, inputs left out",
            )
        )
    return figures


def measure(figure: str, ways: tuple[str, ...], quick: bool) -> dict[str, dict[str, float]]:
    """Medians of seconds and peak bytes of each way, each round of each way in a fresh process."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(1 if quick else 3):
        for way in ways:
            command = [sys.executable, __file__, "--way", figure, way, *(["--quick"] if quick else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[way].append(json.loads(done.stdout))
    return {way: {key: median(run[key] for run in found) for key in found[0]} for way, found in runs.items()}


def run_way(figure: str, way: str, *, quick: bool) -> dict[str, float]:
    """One way in this process: median seconds of a few calls, peak bytes above what the inputs take."""
    import time

    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    small, full, quicker = SIZES[figure]
    WAYS[figure](way, small)()  # loads the code of the kernels, which is no memory of the way
    call = WAYS[figure](way, quicker if quick else full)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    seconds = []
    for _ in range(3):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return {"seconds": median(seconds), "peak": max(1.0, _memory("VmHWM") - before)}


def _memory(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) * 1024
    raise KeyError(name)


def _attention_way(way: str, total: int) -> Callable[[], object]:
    import torch
    import torch.nn.functional as F

    from mindvl_ops import Segments
    from mindvl_ops import attention as packed

    cuts = torch.rand(64).add(0.1)
    lengths = (cuts / cuts.sum() * (total - 64)).int().add(1).tolist()
    lengths[0] += total - sum(lengths)
    qkv = [torch.randn(total, 4, 64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(total, 4, 64)
    if way == "ours":
        segments = Segments(lengths)
        return lambda: torch.autograd.grad(packed(*qkv, segments, causal=True), qkv, grad)

    def dense() -> object:
        owner = torch.repeat_interleave(torch.arange(64), torch.tensor(lengths))
        keep = (owner[:, None] == owner[None, :]).tril_()  # made for every row, as the plan of ours is
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)[0].transpose(0, 1)
        return torch.autograd.grad(output, qkv, grad)

    return dense


def _patches_way(way: str, count: int) -> Callable[[], object]:
    import torch
    import torch.nn.functional as F

    from mindvl_ops import conv_weight_to_matmul, patch_embed

    patches = torch.randn(count, 3 * 2 * 14 * 14)
    weight = torch.randn(1280, 3, 2, 14, 14, requires_grad=True)
    grad = torch.randn(len(patches), 1280)
    if way == "ours":
        return lambda: torch.autograd.grad(patch_embed(patches, conv_weight_to_matmul(weight)), weight, grad)
    return lambda: torch.autograd.grad(F.conv3d(patches.view(-1, 3, 2, 14, 14), weight).flatten(1), weight, grad)


def _loss_way(way: str, tokens: int) -> Callable[[], object]:
    import torch
    import torch.nn.functional as F

    from mindvl_ops import cross_entropy, linear_cross_entropy

    hidden = torch.randn(tokens, 128, requires_grad=True)
    weight = torch.randn(VOCABULARY if tokens > 1 else 300, 128, requires_grad=True)
    labels = torch.randint(0, len(weight), (tokens,))
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: F.cross_entropy(hidden @ weight.T, labels, reduction="none"),
        "by rows": lambda: cross_entropy(hidden @ weight.T, labels),
        "fused with the output layer": lambda: linear_cross_entropy(hidden, weight, labels),
    }
    return lambda: torch.autograd.grad(losses[way]().sum(), (hidden, weight))


SIZES = {"attention": (128, 8192, 2048), "patches": (2, 4096, 512), "loss": (1, 1024, 128)}  # warm-up, full, quick
WAYS = {"attention": _attention_way, "patches": _patches_way, "loss": _loss_way}

if __name__ == "__main__":
    main()
