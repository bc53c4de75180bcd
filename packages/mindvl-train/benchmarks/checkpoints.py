# SPDX-License-Identifier: Apache-2.0
"""How long training stands still for a checkpoint, in the foreground and in the background.

    python packages/mindvl-train/benchmarks/checkpoints.py [--parameters 8] [--directory DIR]

Weights and optimizer state of so many million parameters in fp32, 12 bytes each, saved five times in turn both ways.
The directory's disk decides the figures; nothing is trained in between, so the background has the machine to itself.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindvl_model import MindVLModel, set_up_device
from mindvl_model.testing.tiny import smallest_config

ROUNDS = 5


class NoData:
    """A source without a position."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


def main() -> None:
    """Print the state's size, and the median and largest stall of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=8.0, help="millions")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory's")
    given = parser.parse_args()
    accelerator = set_up_device()
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_train import CheckpointConfig, OptimizerConfig
    from mindvl_train.checkpoints.saving import Saver
    from mindvl_train.megatron.optimizer import build_optimizer, wrap_models
    from mindvl_train.parallel_state import process_groups
    from mindvl_train.state import TrainState

    tiny = smallest_config()
    ffn_hidden_size = int(given.parameters * 1e6 / (8 * 3 * 256))
    language = replace(tiny.language, hidden_size=256, num_layers=8, ffn_hidden_size=ffn_hidden_size)
    with process_groups(accelerator, seed=0), tempfile.TemporaryDirectory(dir=given.directory) as directory:
        models = wrap_models([MindVLModel(replace(tiny, language=language), BuildConfig())])
        optimizer = build_optimizer(models, OptimizerConfig())
        models[0].zero_grad_buffer()
        optimizer.step()
        state = TrainState(models=models, optimizer=optimizer, source=NoData())
        described = {"model": {}, "run": {}, "parents": []}
        ways = {
            name: Saver(
                Path(directory) / name, CheckpointConfig(keep_last=1, async_save=name == "background"), described
            )
            for name in ("foreground", "background")
        }
        stalls: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            state.step += 1
            for name, saver in ways.items():
                saver.save(state)
                stalls[name].append(saver.stall_s)
                saver.finish()
        written = sum(path.stat().st_size for path in (Path(directory) / "background").rglob("*") if path.is_file())
    print(f"{written / 1e6:.1f} MB")
    for name, seconds in stalls.items():
        first, *others = seconds
        print(
            f"{name}: first {first:.3f} s, then median {statistics.median(others):.3f} s, at most {max(others):.3f} s"
        )


if __name__ == "__main__":
    main()
