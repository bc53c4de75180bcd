# SPDX-License-Identifier: Apache-2.0
"""Counts of the packs since the last report, made on the host.

Updated after every step, read by metrics.py once per report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindvl_model import MindVLConfig
from mindvl_model.flops import pack_flops
from mindvl_model.parameters import PARTS, Part
from mindvl_train.interfaces import Batch, SampleReference

MODALITIES = ("text", "image", "video")  # a sample with a video counts as video, with images as image


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Constants of a run that its metrics need."""

    model: MindVLConfig
    sources: tuple[str, ...]
    seq_length: int  # tokens of one pack, with padding
    trained_parts: tuple[Part, ...] = PARTS
    adapted: bool = False  # only adapters of these parts are trained
    # Learning rates of parts divided by that of the schedule.
    rate_factors: dict[str, float] = field(default_factory=dict)
    peak_tflops: float | None = None  # bf16 peak of one device; None: unknown, no MFU is reported


@dataclass
class PackCounts:
    """Counts summed over packs."""

    packs: int = 0
    samples: int = 0  # without failed ones
    sample_tokens: int = 0  # without padding
    visual_tokens: int = 0
    placeholders: int = 0  # failed samples, on any rank of the model-parallel group


class PackCounter:
    """Counts packs on this rank; all ranks of a model-parallel group have the same counts.

    The class of a sample is its source and its modality; class number = source * len(MODALITIES) + modality.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._source_numbers = {name: number for number, name in enumerate(facts.sources)}
        self.counts = PackCounts()
        self.tokens_by_source = [0] * len(facts.sources)
        self.work: list[tuple[float, float]] = []  # TFLOP of vision and language per step

    def add_step(self, packs: Sequence[Batch]) -> None:
        """Count the packs of one step."""
        vision = language = 0
        for pack in packs:
            inputs = pack.model_inputs()
            lengths = inputs["cu_seqlens"].diff().tolist()[: len(pack.samples)]  # without the padding
            images, videos = (_grids(inputs[name]) for name in ("image_grid_thw", "video_grid_thw"))
            work = pack_flops(
                self._facts.model,
                lengths,
                images,
                videos,
                num_loss_tokens=pack.num_loss_tokens,
                trainable=self._facts.trained_parts,
                adapted=self._facts.adapted,
            )
            vision += work.vision.total + work.projector.total
            language += work.language.total + work.mtp.total
            counts = self.counts
            patches = sum(time * height * width for time, height, width in (*images, *videos))
            counts.packs += 1
            num_failed = sum(sample.failed for sample in pack.samples)
            counts.samples += len(pack.samples) - num_failed
            counts.placeholders += num_failed
            counts.sample_tokens += sum(lengths)
            counts.visual_tokens += patches // self._facts.model.vision.spatial_merge_size**2
            for sample, length in zip(pack.samples, lengths, strict=True):
                self.tokens_by_source[self._source_numbers[sample.source]] += length
        self.work.append((vision / 1e12, language / 1e12))

    def classes(self, pack: Batch) -> list[int]:
        """Class number of each sample of a pack."""
        return [self._source_numbers[sample.source] * len(MODALITIES) + _modality(sample) for sample in pack.samples]


def _modality(sample: SampleReference) -> int:
    return 2 if sample.num_videos else 1 if sample.num_images else 0


def _grids(grids: object) -> list[tuple[int, int, int]]:
    return [] if grids is None else [tuple(grid) for grid in grids.tolist()]  # type: ignore[attr-defined]
