# SPDX-License-Identifier: Apache-2.0
"""Training steps whose output layer computes loss tokens only, beside steps that compute all tokens.

Both take the same packs in the same process, in alternation, forward and backward without an update. Time is processor
time of one thread. "all" passes no loss_positions; "recomputed" also makes the logits in pieces (linear_cross_entropy).
Run: python packages/mindvl-train/benchmarks/loss_tokens.py [--rounds N] [--vocab V] [--share S]
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from samples import model_of

from mindvl_model import MindVLConfig, TokenConfig, set_up_device
from mindvl_train.layout_search.measure import RandomBatch
from mindvl_train.layout_search.packs import Pack

TOKENS = TokenConfig(image=5, vision_start=3, vision_end=4, end_of_turn=2, pad=0)
LENGTHS = (300, 180, 420, 124)  # 1,024 tokens, of which 400 are visual
GRID = (1, 40, 40)


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="20M", help="a size of samples.py, with another vocabulary")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--share", type=float, default=0.37, help="loss tokens of all tokens")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    section = model_of(arguments.size)
    assert section.language is not None
    assert section.vision is not None
    language = replace(section.language, vocab_size=arguments.vocab)
    config = MindVLConfig(vision=section.vision, language=language, tokens=TOKENS)
    pack = Pack(segments=LENGTHS, grids=(GRID,), num_loss_tokens=round(arguments.share * sum(LENGTHS)))
    print(json.dumps(measure(config, pack, arguments.rounds), indent=1))


def measure(config: MindVLConfig, pack: Pack, rounds: int) -> dict[str, Any]:
    """Medians of seconds, and the loss, of each way."""
    set_up_device()
    from mindvl_model.megatron.process import single_process
    from mindvl_model.model import MindVLModel
    from mindvl_model.parallel_config import BuildConfig
    from mindvl_model.parameters import initialize

    with single_process():
        model = MindVLModel(config, BuildConfig())
        initialize(model, config, seed=0)
        inputs = RandomBatch.of(pack, config).model_inputs()
        ways = {
            "all": (None, {**inputs, "loss_positions": None}),
            "loss tokens": (None, inputs),
            "loss tokens, recomputed logits": ("selective", inputs),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        losses = {}
        for _ in range(rounds + 1):  # the first warms up
            for name, (recompute, given) in ways.items():
                # Only the output layer: the decoder of all ways is the same.
                model.language.output_layer.config = replace(model.config, recompute_granularity=recompute)
                model.zero_grad(set_to_none=True)
                gc.collect()
                started = time.thread_time()
                loss = model(**given)
                loss.backward()
                seconds[name].append(time.thread_time() - started)
                losses[name] = loss.item()
    medians = {name: median(values[1:]) for name, values in seconds.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": pack.tokens,
        "loss_tokens": pack.num_loss_tokens,
        "seconds": medians,
        "times faster": {name: medians["all"] / value for name, value in medians.items()},
        "loss": losses,
    }


if __name__ == "__main__":
    main()
