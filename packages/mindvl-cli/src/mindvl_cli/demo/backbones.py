# SPDX-License-Identifier: Apache-2.0
"""Pre-train the vision encoder of the demo: MindVL starts from a pre-trained one (paper, section 5.1).

Comes after the images, before the warm-up. Trains on single digits with a linear head over merge blocks, which is
discarded; the warm-up starts from the vision encoder of the written transformers directory.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_cli.demo.settings import BLOCK, VisionBackboneSettings
from mindvl_cli.demo.tasks import make_example

Grid = tuple[int, int, int]


class DigitHead(torch.nn.Module):
    """Classify the digit of an image: the mean over merge blocks of a linear layer."""

    def __init__(self, hidden_size: int, merge_unit: int) -> None:
        super().__init__()
        self.block_size = hidden_size * merge_unit
        self.norm = torch.nn.RMSNorm(hidden_size, eps=1e-6)
        self.linear = torch.nn.Linear(self.block_size, 10)

    def forward(self, hidden_states: Tensor, image_of_block: Tensor, num_images: int) -> Tensor:
        """Logits [num_images, 10] from patches [P, H] and the image of each merge block [G]."""
        scores = self.linear(self.norm(hidden_states).view(-1, self.block_size))
        counts = torch.bincount(image_of_block, minlength=num_images)
        return scores.new_zeros(num_images, 10).index_add(0, image_of_block, scores) / counts[:, None]


def pretrain_vision(
    out: Path,
    config: Any,
    settings: VisionBackboneSettings,
    *,
    tokenizer: Path,
    seed: int,
    on_step: Callable[[int, float], None],
) -> dict[str, Any]:
    """Train the vision encoder of a MindVL configuration on single digits and write it as a transformers directory.

    Returns:
        The loss curve, and the accuracy on validation digits (scans that no training image uses).
    """
    from mindvl_data import ImageConfig
    from mindvl_model import set_up_device

    set_up_device()
    from mindvl_model.hf.export import export_hf_directory
    from mindvl_model.hf.processor_files import ProcessorSettings
    from mindvl_model.megatron.blocks import BuildConfig
    from mindvl_model.megatron.process import single_process
    from mindvl_model.model import MindVLModel
    from mindvl_model.parameters import initialize
    from mindvl_ops import AdamW

    image = ImageConfig(min_pixels=BLOCK, max_pixels=64 * BLOCK)
    images = [_digit("train", seed, index, image) for index in range(settings.num_images)]
    with single_process():
        model = MindVLModel(config, BuildConfig())
        initialize(model, config, seed)
        torch.manual_seed(seed)
        head = DigitHead(config.vision.hidden_size, config.vision.spatial_merge_size**2)
        assert model.vision is not None
        parameters = [*model.vision.parameters(), *head.parameters()]
        optimizer = AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=settings.weight_decay)
        curve, recent = [], []
        order = np.random.default_rng(seed)
        chosen = np.empty(0, np.int64)
        for step in range(settings.steps):
            while len(chosen) < settings.batch_size:
                chosen = np.concatenate((chosen, order.permutation(len(images))))
            batch, chosen = [images[i] for i in chosen[: settings.batch_size]], chosen[settings.batch_size :]
            truth = torch.tensor([digit for *_, digit in batch])
            loss = F.cross_entropy(_classify(model, head, batch), truth, label_smoothing=settings.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            rate = _rate(settings, step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            recent.append(loss.item())
            if (step + 1) % 20 == 0 or step + 1 == settings.steps:
                curve.append([step + 1, sum(recent) / len(recent), rate])
                recent.clear()
            on_step(step + 1, loss.item())
        accuracy = _accuracy(model, head, [_digit("validation", seed + 1, index, image) for index in range(500)])
        export_hf_directory(
            model,
            config,
            out,
            tokenizer=tokenizer,
            processor=ProcessorSettings(min_pixels=image.min_pixels, max_pixels=image.max_pixels),
        )
    return {"curve": curve, "validation_accuracy": accuracy}


def _rate(settings: VisionBackboneSettings, step: int) -> float:
    warmup = max(1, round(settings.steps * settings.lr_warmup_ratio))
    if step < warmup:
        return settings.peak_lr * (step + 1) / warmup
    return settings.peak_lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, settings.steps - warmup)))


def _digit(split: Any, seed: int, index: int, image: Any) -> tuple[Tensor, Grid, int]:
    from PIL import Image

    from mindvl_data.images import to_patches

    example = make_example("digit", split=split, seed=seed, index=index)
    patches, grid = to_patches(Image.fromarray(example.pages[0].image), image)
    return torch.from_numpy(patches), grid, int(example.answer)


def _classify(model: Any, head: DigitHead, batch: list[tuple[Tensor, Grid, int]]) -> Tensor:
    from mindvl_model.vision.positions import patch_order

    grids = [grid for _, grid, _ in batch]
    order = patch_order(grids, model.mindvl.vision)
    hidden = model.vision(torch.cat([patches for patches, _, _ in batch]), order)
    merge_unit = model.mindvl.vision.spatial_merge_size**2
    blocks = torch.tensor([height * width // merge_unit for _, height, width in grids])
    image = torch.repeat_interleave(torch.arange(len(grids)), blocks)
    # Windows stay inside an image, so the vision encoder's order moves blocks only within their own image.
    return head(hidden, image, len(grids))


@torch.no_grad()
def _accuracy(model: Any, head: DigitHead, images: list[tuple[Tensor, Grid, int]]) -> float:
    guesses = _classify(model, head, images).argmax(-1)
    return float((guesses == torch.tensor([digit for *_, digit in images])).float().mean())
