# SPDX-License-Identifier: Apache-2.0
"""Train the same recipe with mindvl and with a reference loop over transformers; compare losses, norms, parameters.

The training check of the paper (A.2, Figures 5 to 7) for any recipe. Both start from the same weights and use the same
samples: mindvl packed, with megatron-core and its own operators, the reference sample by sample, with the positions of
transformers. bounds.py has the tolerances.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from mindvl_data import Batch, Loader
from mindvl_model import set_up_device
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.parallel_config import ParallelConfig
from mindvl_train.checks.adapter_alignment import check_adapter, exported_adapter, write_start_adapter
from mindvl_train.checks.bounds import ALIGNMENT_BOUNDS, BF16_MARGIN, BF16_NOISE
from mindvl_train.checks.jobs import apart
from mindvl_train.checks.plain import PlainTraining, load_plain
from mindvl_train.checks.runs import SMALL
from mindvl_train.checks.windows import exercises_windows, window_note
from mindvl_train.config import CheckpointConfig, LayerDecay, MetricsConfig, RunConfig
from mindvl_train.errors import TrainError
from mindvl_train.metrics.sinks import read_metrics
from mindvl_train.rates import learning_rate, part_factors


@dataclass(frozen=True, kw_only=True)
class AlignedStep:
    """Loss and gradient norm of one step on both sides."""

    step: int
    loss: float  # mean over loss tokens
    plain_loss: float
    grad_norm: float  # before clipping
    plain_grad_norm: float

    @property
    def difference(self) -> float:
        """Relative difference of the losses."""
        return _relative(self.loss, self.plain_loss)

    @property
    def norm_difference(self) -> float:
        """Relative difference of the gradient norms."""
        return _relative(self.grad_norm, self.plain_grad_norm)


@dataclass(frozen=True, kw_only=True)
class AlignmentReport:
    """Comparison of two runs over the same samples."""

    phase: str
    precision: str
    steps: tuple[AlignedStep, ...]
    parameter_difference: float  # relative difference of the change of the worst parameter
    parameter: str  # name of the worst parameter in transformers
    moved_tokens: int  # tokens whose position differs from transformers
    bounds: Mapping[str, float] = field(default_factory=lambda: ALIGNMENT_BOUNDS)  # bounds of `differences`
    note: str = ""  # limits of the data

    @property
    def mean_difference(self) -> float:
        """Mean relative difference of the losses."""
        return sum(step.difference for step in self.steps) / len(self.steps)

    @property
    def differences(self) -> dict[str, float]:
        """Differences by the name of their bound."""
        return {
            "loss": self.mean_difference,
            "grad_norm": sum(step.norm_difference for step in self.steps) / len(self.steps),
            "parameters": self.parameter_difference,
        }

    @property
    def bound(self) -> float:
        """Bound of the mean difference of the losses."""
        return self.bounds["loss"]

    @property
    def beyond(self) -> dict[str, float]:
        """The differences that exceed their bounds, including NaN."""
        return {name: value for name, value in self.differences.items() if not value <= self.bounds[name]}

    @property
    def holds(self) -> bool:
        """Whether all differences are within their bounds."""
        return not self.beyond and not self.moved_tokens


def check_alignment(
    config: RunConfig, directory: Path, *, on_step: Callable[[int], None] = lambda done: None
) -> AlignmentReport:
    """Train schedule.steps steps of a recipe twice, in one process; in bf16 the reference also in fp32.

    Args:
        directory: Empty directory for the initial weights and the mindvl run.
        on_step: Called with the number of finished steps of all runs (`num_steps`).

    Raises:
        TrainError: The recipe uses a feature that transformers does not train: multi-token prediction, routing bias
            updates or a load balancing loss.
    """
    steps = config.schedule.steps
    config = replace(
        apart(config),
        out=directory / "ours",
        parallel=ParallelConfig(),
        metrics=MetricsConfig(every_steps=1, tensorboard=False),
        checkpoints=CheckpointConfig(every_steps=steps, keep_last=1),
    )
    _check_supported(config)
    _check_rates(config)
    check_adapter(config)
    write_start(config, directory / "start")
    from mindvl_train.run import run_training

    run_training(config, resume="never", on_step=lambda step, loss: on_step(step))
    ours = [(line["loss"], line["grad_norm"]) for line in read_metrics(config.out / "metrics.jsonl")]
    theirs = _train_plainly(config, directory / "start", lambda step: on_step(steps + step))
    bounds = ALIGNMENT_BOUNDS
    if config.precision == "bf16":
        exact = replace(config, precision="fp32")
        bounds = _noise_bounds(
            theirs, _train_plainly(exact, directory / "start", lambda step: on_step(2 * steps + step))
        )
    parameter, difference = _worst_parameter(theirs, _exported(config, directory / "end"))
    return AlignmentReport(
        phase=config.phase,
        precision=config.precision,
        steps=_aligned(ours, theirs.steps),
        parameter_difference=difference,
        parameter=parameter,
        moved_tokens=theirs.training.moved_tokens,
        bounds=bounds,
        note=theirs.note,
    )


def num_steps(config: RunConfig) -> int:
    """Number of steps of all runs of check_alignment."""
    return config.schedule.steps * (2 if config.precision == "fp32" else 3)


def _check_supported(config: RunConfig) -> None:
    language = config.model.resolved.language
    untrained: dict[str, float] = {"num_mtp_layers": language.num_mtp_layers}
    if language.experts is not None:
        untrained |= {name: getattr(language.experts, name) for name in ("bias_update_rate", "aux_loss_weight")}
    for name, value in untrained.items():
        if value:
            raise TrainError(
                f"model.language.{name}: is {value}, which transformers does not train. "
                f"Set model.language.{name}=0 for this check."
            )


def _check_rates(config: RunConfig) -> None:
    schedule = config.schedule
    if part_factors(config) or schedule.layer_decay != LayerDecay():
        raise TrainError(
            "schedule.peak_lr_by_part and schedule.layer_decay: this check trains all parameters with one learning rate. Set "
            "schedule.peak_lr_by_part={} schedule.layer_decay={} for it."
        )


def write_start(config: RunConfig, start: Path) -> None:
    """Write the initial weights of a run as a transformers directory, and its initial adapters beside it."""
    device = set_up_device().device()
    from mindvl_model.hf.export import export_hf_directory
    from mindvl_model.megatron.process import single_process
    from mindvl_train.resolved_run import resolve_run, with_tokenizer
    from mindvl_train.weights import build_models

    run = with_tokenizer(resolve_run(config, 1))
    with single_process():
        model = build_models(run, device, load_init=True)[0]
        export_hf_directory(
            model,
            run.model,
            start,
            tokenizer=config.data.tokenizer,
            processor=_processor(config),
        )
        write_start_adapter(model, config, start)


def _processor(config: RunConfig) -> ProcessorSettings:
    image = config.data.image
    return ProcessorSettings(min_pixels=image.min_pixels, max_pixels=image.max_pixels)


@dataclass(frozen=True)
class _Plain:
    """A finished reference training."""

    training: PlainTraining
    steps: list[tuple[float, float]]  # loss and gradient norm
    note: str


def _train_plainly(config: RunConfig, start: Path, on_step: Callable[[int], None]) -> _Plain:
    from mindvl_train.resolved_run import tokenized_model

    model_config = tokenized_model(config)
    # Trusted: write_start has just created this directory with the code of this package.
    plain = PlainTraining(start, model_config, config, set_up_device().device(), trust_remote_code=True)
    found, windows_cut = [], False
    with Loader(
        config.data,
        global_batch_size=config.global_batch_size,
        position_kind=model_config.position_kind,
        vocab_size=model_config.language.vocab_size,
    ) as source:
        for step in range(config.schedule.steps):
            packs: list[Batch] = [next(source) for _ in range(config.global_batch_size)]
            windows_cut = windows_cut or exercises_windows(packs, model_config.vision)
            found.append(plain.step(packs, learning_rate(config.schedule, step)))
            on_step(step + 1)
    return _Plain(plain, found, "" if windows_cut else window_note([], model_config.vision))


def _aligned(ours: list[tuple[float, float]], plain: list[tuple[float, float]]) -> tuple[AlignedStep, ...]:
    return tuple(
        AlignedStep(step=number, loss=loss, plain_loss=plain_loss, grad_norm=norm, plain_grad_norm=plain_norm)
        for number, ((loss, norm), (plain_loss, plain_norm)) in enumerate(zip(ours, plain, strict=True), start=1)
    )


def _noise_bounds(rounded: _Plain, exact: _Plain) -> dict[str, float]:
    """Bounds in bf16: a multiple of the differences between the reference in bf16 and in fp32."""
    steps = _aligned(rounded.steps, exact.steps)
    noise = {
        "loss": sum(step.difference for step in steps) / len(steps),
        "grad_norm": sum(step.norm_difference for step in steps) / len(steps),
        "parameters": _worst_parameter(exact, rounded.training.end())[1],
    }
    return {name: BF16_MARGIN * max(value, BF16_NOISE) for name, value in noise.items()}


def _exported(config: RunConfig, end: Path) -> dict[str, Tensor]:
    """The fp32 parameters at the end of the mindvl run, by their names in transformers."""
    from mindvl_model.hf.export import write_hf_directory
    from mindvl_model.megatron.process import single_process
    from mindvl_train.checkpoints.directory import newest_checkpoint
    from mindvl_train.megatron.checkpoint import STATE
    from mindvl_train.megatron.tensor_files import TensorReader, stored_parameters
    from mindvl_train.resolved_run import DTYPES, tokenized_model

    if config.adapter is not None:
        return exported_adapter(config, end)
    model_config = tokenized_model(config)
    reader = TensorReader(newest_checkpoint(config.out) / "tensors")
    with single_process():
        stored = stored_parameters(model_config, DTYPES[config.precision])

    def read(name: str) -> Tensor:
        parameter = stored[name]
        master = f"{STATE}.param.{parameter.key}"  # the optimizer keeps fp32 copies of bf16 parameters
        if master in reader.tensors:
            parameter = replace(parameter, key=master, dtype=torch.float32)
        return reader.read(parameter).float()

    write_hf_directory(
        read, torch.float32, model_config, end, tokenizer=config.data.tokenizer, processor=_processor(config)
    )
    return dict(load_plain(end, trust_remote_code=True).named_parameters())


def _worst_parameter(plain: _Plain, ours: dict[str, Tensor]) -> tuple[str, float]:
    """Name and relative difference of the parameter whose change by training differs most from the reference.

    Elements are weighted by the size of their gradients, because Adam makes full updates for gradients that consist of
    rounding errors, such as those of key biases.
    """
    start, end = plain.training.start, plain.training.end()
    sizes = plain.training.gradient_sizes()
    largest = max(float(size.max()) for size in sizes.values())
    return max(
        (
            (
                name,
                _weighted(ours[name].detach() - end[name], size) / max(_weighted(end[name] - start[name], size), 1e-30),
            )
            for name, size in sizes.items()
            if float(size.max()) > SMALL * largest
        ),
        key=lambda one: math.inf if math.isnan(one[1]) else one[1],
    )


def _weighted(change: Tensor, size: Tensor) -> float:
    return float((change * size).norm())


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-12)
