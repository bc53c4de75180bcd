# SPDX-License-Identifier: Apache-2.0
"""The same recipe trained by mindvl and by a plain loop over transformers: do the loss curves lie on each other?

The training check of the paper (A.2, Figures 5 to 7) for any recipe. Both start from the same weights and see the same
batches; ours packed, by megatron-core and our operators, theirs sample by sample.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mindvl_data import Loader
from mindvl_model import enter
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_train.checks.jobs import apart
from mindvl_train.config import CheckpointConfig, MetricsConfig, ParallelConfig, RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.metrics.sinks import read_metrics
from mindvl_train.schedule import learning_rate

BOUND = {
    "fp32": 1e-3,
    "bf16": 1e-2,
}  # of the mean relative difference of losses; the paper calls a percent near-perfect


@dataclass(frozen=True, kw_only=True)
class AlignedStep:
    """One update as both sides saw it."""

    step: int
    loss: float  # mean over learned tokens
    plain_loss: float
    grad_norm: float  # before clipping
    plain_grad_norm: float

    @property
    def difference(self) -> float:
        """Of the losses, relative to the plain one."""
        return abs(self.loss - self.plain_loss) / max(abs(self.plain_loss), 1e-12)


@dataclass(frozen=True, kw_only=True)
class AlignmentReport:
    """Two loss curves over the same batches."""

    phase: str
    precision: str
    steps: tuple[AlignedStep, ...]

    @property
    def mean_difference(self) -> float:
        """Mean relative difference of the losses."""
        return sum(step.difference for step in self.steps) / len(self.steps)

    @property
    def bound(self) -> float:
        """What the mean may be."""
        return BOUND[self.precision]

    @property
    def holds(self) -> bool:
        """Whether the curves lie on each other; NaN does not."""
        return math.isfinite(self.mean_difference) and self.mean_difference <= self.bound


def check_alignment(
    config: RunConfig, folder: Path, *, on_step: Callable[[int], None] = lambda done: None
) -> AlignmentReport:
    """Train schedule.steps steps of a recipe twice, in one process.

    Args:
        folder: An empty one for the weights both start from and for our run.
        on_step: Told the number of finished steps; both sides count.

    Raises:
        TrainError: The recipe trains what transformers does not: multi-token prediction or moving routing biases.
    """
    config = replace(
        apart(config),
        out=folder / "ours",
        parallel=ParallelConfig(),
        metrics=MetricsConfig(every_steps=1, tensorboard=False),
        checkpoints=CheckpointConfig(every_steps=config.schedule.steps, keep_last=1),
    )
    _refuse_what_plain_training_lacks(config)
    write_start(config, folder / "start")
    from mindvl_train.run import run_training

    run_training(config, resume="never", on_step=lambda step, loss: on_step(step))
    ours = read_metrics(config.out / "metrics.jsonl")
    theirs = _train_plainly(config, folder / "start", lambda step: on_step(config.schedule.steps + step))
    return AlignmentReport(
        phase=config.phase,
        precision=config.precision,
        steps=tuple(
            AlignedStep(
                step=number + 1,
                loss=mine["loss"],
                plain_loss=loss,
                grad_norm=mine["grad_norm"],
                plain_grad_norm=norm,
            )
            for number, (mine, (loss, norm)) in enumerate(zip(ours, theirs, strict=True))
        ),
    )


def _refuse_what_plain_training_lacks(config: RunConfig) -> None:
    language = config.model.resolve().language
    for name in ("num_mtp_layers", "bias_update_rate"):
        if getattr(language, name, 0):
            raise TrainError(
                f"model.language.{name}={getattr(language, name)}: transformers does not train this, so curves would "
                "part. Recipe. Check with a recipe that sets it to 0."
            )


def write_start(config: RunConfig, start: Path) -> None:
    """The weights of a run before its first step, as a transformers folder."""
    device = enter().device()
    from mindvl_model.hf.export import export_hf_folder
    from mindvl_model.megatron.process import single_process
    from mindvl_train.run import model_config_of
    from mindvl_train.weights import build_models

    model_config = model_config_of(config)
    image = config.data.image
    with single_process():
        model = build_models(config, model_config, device, load_init=True)[0]
        export_hf_folder(
            model,
            model_config,
            start,
            tokenizer=config.data.tokenizer,
            processor=ProcessorSettings(min_pixels=image.min_pixels, max_pixels=image.max_pixels),
        )


def _train_plainly(config: RunConfig, start: Path, on_step: Callable[[int], None]) -> list[tuple[float, float]]:
    from mindvl_train.checks.plain import PlainTraining
    from mindvl_train.run import model_config_of

    model_config = model_config_of(config)
    # Trusted: write_start made this directory a moment ago, with the code of this package.
    plain = PlainTraining(start, model_config, config, enter().device(), trust_remote_code=True)
    source = Loader(config.data, packs_per_step=config.packs_per_step, position_kind=model_config.position_kind)
    found = []
    try:
        for step in range(config.schedule.steps):
            rows = [next(source) for _ in range(config.packs_per_step)]
            found.append(plain.step(rows, learning_rate(config.schedule, step)))
            on_step(step + 1)
    finally:
        source.close()
    return found
