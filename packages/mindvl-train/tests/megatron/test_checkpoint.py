# SPDX-License-Identifier: Apache-2.0
"""Any layout continues from what any other saved, over gloo on loopback, as if one process had never stopped."""

import pickle
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mindvl_model import MindVLConfig
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.ranks import run_ranks
from mindvl_model.testing.tiny import smallest_config, smallest_deepseek_v3
from mindvl_train import CheckpointConfig, ModelSection, RunConfig, run_training
from mindvl_train.checkpoints.export import export_checkpoint

pytestmark = pytest.mark.slow

Read = Callable[[Path], dict[str, torch.Tensor]]
Losses = Callable[[RunConfig], list[tuple[int, float, float]]]

# Each continues where the one before stopped, after two steps.
DENSE = (
    ParallelConfig(tp_size=2),
    ParallelConfig(pp_size=2),
    ParallelConfig(pp_size=2, virtual_stages=2),
    ParallelConfig(cp_size=2),
    ParallelConfig(),  # dp_size=2
)
EXPERTS = (
    ParallelConfig(),
    ParallelConfig(ep_size=2),
    ParallelConfig(tp_size=2, ep_size=2),
    ParallelConfig(pp_size=2),
)

WORKER = """
    import os, pickle, signal, sys
    from pathlib import Path
    from mindvl_train import run_training

    for config, last in pickle.loads(Path(sys.argv[1]).read_bytes()):
        def on_step(step, loss):
            if step == last - 1:  # handled in the next step
                os.kill(os.getpid(), signal.SIGTERM)

        assert run_training(config, on_step=on_step).step == last
"""


def run_in_two(runs: list[tuple[RunConfig, int]], directory: Path) -> None:
    """Run configurations in turn in the same two processes, each to a step."""
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps(runs))
    # As torchrun does: a store of ours that the workers meet in.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    run_ranks(
        ["-c", textwrap.dedent(WORKER), str(job)],
        2,
        timeout_s=900,
        environment=agent,
        imports=("mindvl_train.weights", "mindvl_train.loop", "transformers"),
    )


def chain(config: RunConfig, layouts: tuple[ParallelConfig, ...]) -> list[tuple[RunConfig, int]]:
    return [(replace(config, parallel=parallel), 2 * number) for number, parallel in enumerate(layouts, start=1)]


def weights_of(checkpoint: Path, directory: Path) -> dict[str, torch.Tensor]:
    export_checkpoint(checkpoint, directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.multi
def test_every_layout_continues_from_every_other_with_its_optimizer(
    make_config: Callable[..., RunConfig], read_tensors: Read, read_losses: Losses, tmp_path: Path
) -> None:
    deep = smallest_config(vocab_size=264)
    deep = replace(deep, language=replace(deep.language, num_layers=4))
    expert_model = smallest_deepseek_v3(vocab_size=264)

    def config(out: str, model: MindVLConfig, layouts: tuple[ParallelConfig, ...]) -> RunConfig:
        made = make_config(
            out,
            steps=2 * len(layouts) + 1,
            model=ModelSection(vision=model.vision, language=model.language),
            checkpoints=CheckpointConfig(every_steps=2, keep_last=20, async_save=out.startswith("dense")),
        )
        # Adam's first steps follow the sign of a gradient, so that rounding of nearly zero ones would show: damp them.
        return replace(made, optimizer=replace(made.optimizer, epsilon=1e-4))

    runs: list[tuple[RunConfig, RunConfig, tuple[ParallelConfig, ...]]] = [
        (config(f"{name}-one", model, layouts), config(f"{name}-many", model, layouts), layouts)
        for name, model, layouts in (("dense", deep, DENSE), ("experts", expert_model, EXPERTS))
    ]
    run_in_two([run for _, many, layouts in runs for run in chain(many, layouts)], tmp_path)
    for one, many, layouts in runs:
        straight = run_training(one)
        run_training(many)  # one process continues from the last of the layouts
        for (step, loss, norm), expected in zip(read_losses(many), read_losses(one), strict=True):
            assert step == expected[0]
            assert loss == pytest.approx(expected[1], rel=1e-5), (many.out, step)
            assert norm == pytest.approx(expected[2], rel=1e-4), (many.out, step)
        for step in range(2, 2 * len(layouts) + 1, 2):
            name = f"step-{step:08d}"
            expected_tensors = read_tensors(straight.checkpoint.with_name(name))
            tensors = read_tensors(many.out / "checkpoints" / name)
            assert tensors.keys() == expected_tensors.keys()
            for key, tensor in expected_tensors.items():
                tolerance = 1e-4 * float(tensor.abs().max())
                torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=tolerance, msg=f"{name} {key}")
            ledgers = [(run.out / "checkpoints" / name / "ledger.json").read_bytes() for run in (one, many)]
            assert ledgers[0] == ledgers[1]

    one, many, _ = runs[0]
    for step in (2, 6):  # tensor parallel; virtual stages
        name = f"step-{step:08d}"
        exported, expected_weights = (
            weights_of(run.out / "checkpoints" / name, tmp_path / f"{run.out.name}-{step}") for run in (many, one)
        )
        assert exported.keys() == expected_weights.keys()
        for key, tensor in expected_weights.items():
            torch.testing.assert_close(exported[key], tensor, rtol=0, atol=1e-5, msg=key)
