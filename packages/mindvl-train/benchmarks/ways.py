# SPDX-License-Identifier: Apache-2.0
"""The contenders of the step benchmark: our run, our model in a bare loop, transformers by pack and in padded batches.

Used by step.py; each runs in a process of its own and returns tokens per second and what describes its work.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from samples import SIZES, run_of, write_samples
from torch import Tensor
from workloads import draw

from mindvl_data import Batch, Loader
from mindvl_model import MindVLConfig, set_up_device
from mindvl_train import RunConfig, run_training
from mindvl_train.checks.plain import IGNORE_INDEX, PlainTraining, adamw, samples_of
from mindvl_train.metrics.sinks import read_metrics
from mindvl_train.resolved_run import resolve_run, tokenized_model, with_tokenizer

WARM_UP = 3  # steps before the clock starts
PADDED_BATCH = 8
WORKLOAD_PACK = 4096
Result = dict[str, float]


def ours(directory: Path, size: str, steps: int) -> Result:
    """run_training on full packs: loader, loop, schedule, metrics and all."""
    return _train(_equal(directory, size, steps))


def packed(directory: Path, size: str, steps: int) -> Result:
    """run_training on the packed workload."""
    return _train(_workload(directory, size, steps))


def transformers(directory: Path, size: str, steps: int) -> Result:
    """transformers' model on the same full packs."""
    config = _equal(directory, size, steps)
    plain = _plain(config, directory)
    return _timed(plain.model, list(_steps(config)), lambda packs: plain.step(packs, 1e-4))


def bare(directory: Path, size: str, steps: int) -> Result:
    """Our model on the same full packs: forward, backward, clip, torch's AdamW."""
    config = _equal(directory, size, steps)
    device = set_up_device().device()
    from mindvl_model.megatron.process import single_process
    from mindvl_train.weights import build_models

    with single_process():
        [model] = build_models(with_tokenizer(resolve_run(config, 1)), device, load_init=True)
        optimizer = adamw(model, config.optimizer)

        def step(packs: Sequence[Batch]) -> None:
            for pack in packs:
                model(**pack.model_inputs()).backward()
            count = sum(pack.num_loss_tokens for pack in packs)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= count
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

        return _timed(model, list(_steps(config)), step)


def padded(directory: Path, size: str, steps: int) -> Result:
    """transformers' model on the workload's samples in their order, each batch padded to its longest."""
    config = _workload(directory, size, steps)
    plain = _plain(config, directory)
    samples = [sample for packs in _steps(config) for pack in packs for sample in samples_of(pack, plain.config)]
    whole = len(samples) // PADDED_BATCH * PADDED_BATCH
    batches = [samples[start : start + PADDED_BATCH] for start in range(0, whole, PADDED_BATCH)]
    real, computed, seconds = 0, 0, 0.0
    for number, batch in enumerate(batches):
        inputs, labels = _pad(batch, plain.config)
        started = time.thread_time()
        logits = plain.model(**inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        if number:  # the first warms up
            seconds += time.thread_time() - started
            real += sum(sample["labels"].numel() for sample in batch)
            computed += labels.numel()
    return {"tokens_per_s": real / seconds, "padding": 1 - real / computed}


WAYS: dict[str, Callable[[Path, str, int], Result]] = {
    "ours": ours,
    "transformers": transformers,
    "bare": bare,
    "packed": packed,
    "padded": padded,
}


def _equal(directory: Path, size: str, steps: int) -> RunConfig:
    """Full packs for `steps` measured steps."""
    _, _, _, seq_length, global_batch_size = SIZES[size]
    steps += WARM_UP
    count = 4 * global_batch_size * (steps + 8)  # the packer reads ahead
    write_samples(directory, [seq_length] * count, [seq_length // 2] * count)
    return run_of(directory, size, steps, seq_length=seq_length, global_batch_size=global_batch_size)


def _workload(directory: Path, size: str, steps: int) -> RunConfig:
    """The mixed workload for `steps` measured steps."""
    tokens, visual = draw("issue", 1024, WORKLOAD_PACK, seed=0)
    write_samples(directory, tokens.tolist(), visual.tolist())
    return run_of(directory, size, WARM_UP + steps, seq_length=WORKLOAD_PACK, global_batch_size=1)


def _train(config: RunConfig) -> Result:
    marks: list[float] = []
    torch.set_num_threads(1)
    run_training(config, resume="never", on_step=lambda step, loss: marks.append(time.thread_time()))
    steps = list(_steps(config))
    real = [sum(sample.length for pack in packs for sample in pack.samples) for packs in steps]
    computed = [sum(len(pack.input_ids) for pack in packs) for packs in steps]
    splits = [line["step_split"] for line in read_metrics(config.out / "metrics.jsonl") if "step_split" in line]
    return {
        "tokens_per_s": sum(real[WARM_UP:]) / (marks[-1] - marks[WARM_UP - 1]),
        "tokens_per_step": sum(real) / len(real),
        "padding": 1 - sum(real) / sum(computed),
        "waiting": max(split["data_wait"] / sum(split.values()) for split in splits[1:] or splits),
        "outside": median(
            1 - (split["vision"] + split["language"] + split["optimizer"]) / sum(split.values())
            for split in splits[1:] or splits
        ),
    }


def _steps(config: RunConfig) -> Iterator[list[Batch]]:
    """The packs of every step of a run."""
    position_kind = tokenized_model(config).position_kind
    source = Loader(config.data, global_batch_size=config.global_batch_size, position_kind=position_kind)
    try:
        for _ in range(config.schedule.steps):
            yield [next(source) for _ in range(config.global_batch_size)]
    finally:
        source.close()


def _timed(model: torch.nn.Module, steps: Sequence[Sequence[Batch]], step: Callable[[Any], object]) -> Result:
    torch.set_num_threads(1)
    for packs in steps[:WARM_UP]:
        step(packs)
    started = time.thread_time()
    for packs in steps[WARM_UP:]:
        step(packs)
    seconds = time.thread_time() - started
    real = [sum(sample.length for pack in packs for sample in pack.samples) for packs in steps]
    return {
        "tokens_per_s": sum(real[WARM_UP:]) / seconds,
        "tokens_per_step": sum(real) / len(real),
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
    }


def _plain(config: RunConfig, directory: Path) -> PlainTraining:
    from mindvl_train.checks.alignment import write_start

    torch.set_num_threads(1)
    write_start(config, directory / "start")
    return PlainTraining(
        directory / "start", tokenized_model(config), config, set_up_device().device(), trust_remote_code=True
    )


def _pad(batch: Sequence[dict[str, Tensor]], config: MindVLConfig) -> tuple[dict[str, Tensor], Tensor]:
    """One batch as most collators make it: padded at the right to the longest, media end to end."""
    longest = max(sample["labels"].numel() for sample in batch)

    def together(name: str, fill: int) -> Tensor:
        return torch.cat([F.pad(sample[name], (0, longest - sample[name].shape[-1]), value=fill) for sample in batch])

    inputs = {
        "input_ids": together("input_ids", config.tokens.pad),
        "attention_mask": torch.stack([torch.arange(longest) < sample["labels"].numel() for sample in batch]).long(),
    }
    if "mm_token_type_ids" in batch[0]:
        inputs["mm_token_type_ids"] = together("mm_token_type_ids", 0)
    for name in ("pixel_values", "image_grid_thw"):
        if media := [sample[name] for sample in batch if name in sample]:
            inputs[name] = torch.cat(media)
    labels = torch.stack(
        [F.pad(sample["labels"], (0, longest - sample["labels"].numel()), value=IGNORE_INDEX) for sample in batch]
    )
    return inputs, labels
