# SPDX-License-Identifier: Apache-2.0
"""Reference training loop: a transformers model, one call per sample, torch's AdamW.

The reference of alignment.py and of the step benchmark; it shares only the samples with mindvl. Comes after the export
of a model as a transformers directory.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_data import Batch
from mindvl_model import MindVLConfig, VisionConfig
from mindvl_model.hf.inputs import normalized_pixels
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.weights.names import vision_part
from mindvl_train.checks.adapter_alignment import adapter_beside, with_peft
from mindvl_train.config import OptimizerConfig, Part, RunConfig

IGNORE_INDEX = -100


class PlainTraining:
    """Trains a transformers directory step by step; weights are fp32, with autocast for bf16.

    Attributes:
        moved_tokens: Number of tokens so far whose position in the pack differs from the one of transformers.
        start: The trained parameters before the first step, on the host.
    """

    def __init__(
        self,
        directory: Path,
        model_config: MindVLConfig,
        config: RunConfig,
        device: torch.device,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the directory and freeze the parts that the run does not train.

        Args:
            trust_remote_code: Allow code of the directory; required for a MindVL directory.

        Raises:
            ModelError: The directory cannot be loaded, or requires trust_remote_code.
        """
        self.config, self.device, self.precision = model_config, device, config.precision
        self.clip = config.optimizer.clip_grad_norm
        model = load_plain(directory, trust_remote_code=trust_remote_code).to(device).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of(name) in config.trained_parts)
        self.model = model if config.adapter is None else with_peft(model, adapter_beside(directory), config).train()
        self.optimizer = adamw(self.model, config.optimizer)
        self.start = {name: parameter.detach().cpu().clone() for name, parameter in self._trained()}
        self.moved_tokens = 0
        self._positions: Tensor | None = None
        language: Any = self.model.model.language_model
        language.register_forward_pre_hook(self._keep_positions, with_kwargs=True)

    def step(self, packs: Sequence[Batch], learning_rate: float) -> tuple[float, float]:
        """Update once with the samples of these packs; returns the mean loss and the gradient norm before clipping."""
        loss_sum = torch.zeros((), device=self.device)
        for sample in itertools.chain.from_iterable(samples_of(pack, self.config) for pack in packs):
            inputs = {name: value.to(self.device) for name, value in sample.items()}
            labels, positions = inputs.pop("labels"), inputs.pop("packed_positions")
            with self._autocast():
                logits = self.model(**inputs, use_cache=False).logits
            self._compare_positions(positions)
            loss = F.cross_entropy(logits.squeeze(0).float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
            if loss.requires_grad:  # false for text samples if the language model is frozen
                loss.backward()
            loss_sum += loss.detach()
        num_labels = max(1, sum(pack.num_loss_tokens for pack in packs))
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

    def end(self) -> dict[str, Tensor]:
        """The trained parameters by name, on the host."""
        return {name: parameter.detach().cpu() for name, parameter in self._trained()}

    def gradient_sizes(self) -> dict[str, Tensor]:
        """Square root of the second moment of each element, on the host: the size of its gradients."""
        return {
            name: self.optimizer.state[parameter]["exp_avg_sq"].sqrt().cpu()
            for name, parameter in self._trained()
            if parameter in self.optimizer.state
        }

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, one) for name, one in self.model.named_parameters() if one.requires_grad)

    def _keep_positions(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._positions = kwargs.get("position_ids")

    def _compare_positions(self, packed: Tensor) -> None:
        """Count the tokens of a sample whose position [3, S] in the pack differs from the one of transformers."""
        expected = self._positions
        if expected is None:  # transformers uses the token index on every axis
            expected = torch.arange(packed.shape[1], device=packed.device)
        # [S], [1, S] or [3, 1, S]; of four axes the first is used for masks only.
        expected = expected.reshape(-1, packed.shape[1])[-3:].expand(3, -1)
        self.moved_tokens += int((expected != packed).any(dim=0).sum())

    def _autocast(self) -> AbstractContextManager[None]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def load_plain(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """Load a transformers directory in fp32; arguments and errors as for PlainTraining."""
    from transformers import AutoModelForImageTextToText

    return from_pretrained(
        AutoModelForImageTextToText,
        directory,
        trust_remote_code=trust_remote_code,
        dtype=torch.float32,
        use_safetensors=True,
        attn_implementation="sdpa",
    )


def part_of(name: str) -> Part:
    """The model part of a transformers parameter name."""
    return vision_part(name) or "language"


def adamw(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's fused AdamW over the trained parameters, without weight decay for vectors (norms and biases)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True)


def samples_of(pack: Batch, config: MindVLConfig) -> Iterator[dict[str, Tensor]]:
    """Each sample of a pack as keyword arguments of a transformers model, with `labels` and `packed_positions`.

    `labels` [S] and `packed_positions` [3, S] (positions in the pack) are for the caller; transformers computes its own
    positions. Padding and samples without loss tokens are omitted, because they do not affect loss or gradients.
    """
    inputs = pack.model_inputs()
    images = _Media(inputs["pixel_values"], inputs["image_grid_thw"], config.vision)
    videos = _Media(inputs["pixel_values_videos"], inputs["video_grid_thw"], config.vision)
    seconds = torch.tensor(pack.seconds_per_grid)
    borders = inputs["cu_seqlens"].tolist()
    for start, end in itertools.pairwise(borders):
        ids, labels = inputs["input_ids"][start:end], inputs["labels"][start:end]
        sample = {"input_ids": ids[None], "labels": labels, "packed_positions": inputs["position_ids"][:, start:end]}
        is_image = ids == config.tokens.image
        is_video = torch.zeros_like(is_image) if config.tokens.video is None else ids == config.tokens.video
        pixels, grids = images.take(int(is_image.sum()))
        first_video = videos.num_taken
        frames, video_grids = videos.take(int(is_video.sum()))
        if len(grids):
            sample |= {"pixel_values": pixels, "image_grid_thw": grids}
        if len(video_grids):
            sample |= {"pixel_values_videos": frames, "video_grid_thw": video_grids}
        if config.position_kind != "rope":
            sample["mm_token_type_ids"] = (is_image.int() + 2 * is_video.int())[None]
            if len(video_grids) and not config.vision.entry.video.timestamps:
                sample["second_per_grid_ts"] = seconds[first_video : videos.num_taken]
        if bool((labels != IGNORE_INDEX).any()):
            yield sample


class _Media:
    """Images or videos of a pack, taken sample by sample in order."""

    def __init__(self, pixels: Tensor, grids: Tensor, vision: VisionConfig) -> None:
        self._pixels, self._grids, self._vision = pixels, grids, vision
        self._patches = self.num_taken = 0  # taken so far

    def take(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Normalized patches and grids of the next media with num_tokens visual tokens."""
        merged = self._vision.spatial_merge_size**2
        first_patch, first = self._patches, self.num_taken
        while (self._patches - first_patch) // merged < num_tokens:
            self._patches += int(self._grids[self.num_taken].prod())
            self.num_taken += 1
        patches = self._pixels[first_patch : self._patches]
        return normalized_pixels(patches, self._vision), self._grids[first : self.num_taken]
