# SPDX-License-Identifier: Apache-2.0
"""Training as most people write it: transformers' own model, one call for each sample, torch's AdamW.

The rival of alignment.py and of the step benchmark; nothing of ours is in it but the samples. Comes after a model was
written as a transformers folder.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_model import MindVLConfig, VisionConfig
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.parameters import parameter_group
from mindvl_model.testing.rows import normalized_pixels
from mindvl_model.weights.names import weight_rules
from mindvl_train.config import OptimizerConfig, RunConfig
from mindvl_train.interfaces import Batch

IGNORE_INDEX = -100


class PlainTraining:
    """A transformers folder, trained step by step; weights are fp32, with bf16 by autocast."""

    def __init__(
        self,
        folder: Path,
        model_config: MindVLConfig,
        config: RunConfig,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the directory and freeze what the run does not train.

        Args:
            trust_remote_code: Run the code that the directory carries; a MindVL directory needs it.

        Raises:
            ModelError: The directory cannot be loaded, or needs its own code and that is not allowed.
        """
        from transformers import AutoModelForImageTextToText

        self.config, self.device, self.precision = model_config, device, config.precision
        self.clip = config.optimizer.clip_grad_norm
        model = from_pretrained(
            AutoModelForImageTextToText,
            folder,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
        self.model: torch.nn.Module = model.to(device).train()
        parts = {
            name: parameter_group(rule.param_name) for rule in weight_rules(model_config) for name in rule.hf_names
        }
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parts[name] in config.trained_parts)
        self.optimizer = adamw(self.model, config.optimizer)

    def step(self, rows: Sequence[Batch], learning_rate: float) -> tuple[float, float]:
        """Update once with the samples of these rows; returns the mean loss and the gradient norm before clipping."""
        loss_sum = torch.zeros((), device=self.device)
        for sample in itertools.chain.from_iterable(samples_of(row, self.config) for row in rows):
            inputs = {name: value.to(self.device) for name, value in sample.items()}
            labels = inputs.pop("labels")
            with self._autocast():
                logits = self.model(**inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.squeeze(0).float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
            if loss.requires_grad:  # a text teaches a frozen language model nothing
                loss.backward()
            loss_sum += loss.detach()
        num_labels = max(1, sum(row.num_label_tokens for row in rows))
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad /= num_labels
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self.clip if self.clip > 0 else math.inf))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss_sum) / num_labels, norm

    def _autocast(self) -> AbstractContextManager[None]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def adamw(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's fused AdamW over what is trained; vectors (norms and biases) are not decayed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True)


def samples_of(row: Batch, config: MindVLConfig) -> Iterator[dict[str, Tensor]]:
    """Each sample of a packed row alone, as keyword arguments of a transformers model and `labels` [S].

    Padding and other segments without a learned token are left out: they add nothing to loss or gradients.
    """
    inputs = row.model_inputs()
    images = _Media(inputs["pixel_values"], inputs["image_grid_thw"], config.vision)
    videos = _Media(inputs["pixel_values_videos"], inputs["video_grid_thw"], config.vision)
    borders = inputs["cu_seqlens"].tolist()
    for start, end in itertools.pairwise(borders):
        ids, labels = inputs["input_ids"][start:end], inputs["labels"][start:end]
        sample = {"input_ids": ids[None], "labels": labels}
        pixels, grids = images.take(int((ids == config.tokens.image).sum()))
        frames, video_grids = videos.take(0 if config.tokens.video is None else int((ids == config.tokens.video).sum()))
        if len(grids):
            sample |= {"pixel_values": pixels, "image_grid_thw": grids}
        if len(video_grids):
            sample |= {"pixel_values_videos": frames, "video_grid_thw": video_grids}
        if config.position_kind != "rope":
            sample["position_ids"] = inputs["position_ids"][:, None, start:end]
        if bool((labels != IGNORE_INDEX).any()):
            yield sample


class _Media:
    """Pictures or videos of a row, handed out sample by sample in their order."""

    def __init__(self, pixels: Tensor, grids: Tensor, vision: VisionConfig) -> None:
        self._pixels, self._grids, self._vision = pixels, grids, vision
        self._patches = self._media = 0  # handed out so far

    def take(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Normalised patches and grids of the media that fill this many visual tokens."""
        merged = self._vision.spatial_merge_size**2
        first_patch, first = self._patches, self._media
        while (self._patches - first_patch) // merged < num_tokens:
            self._patches += int(self._grids[self._media].prod())
            self._media += 1
        patches = self._pixels[first_patch : self._patches]
        return normalized_pixels(patches, self._vision), self._grids[first : self._media]
