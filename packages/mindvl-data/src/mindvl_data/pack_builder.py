# SPDX-License-Identifier: Apache-2.0
"""Pack of ordered samples -> Batch: read, encode, decode, collate; a sample that fails becomes a placeholder.

Comes after the data order; the loader calls it from its threads. It keeps no state between packs.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mindvl_data.collate import collate
from mindvl_data.config import DataConfig
from mindvl_data.encode import Encoding, decode_sample, encode_sample, image_patches, placeholder
from mindvl_data.errors import SampleError
from mindvl_data.order.data_order import OrderedSample, Pack
from mindvl_data.order.sources import SourceIndex
from mindvl_data.patches import PatchBuffer, Scratch
from mindvl_data.positions import PositionKind
from mindvl_data.quarantine import FAILED_ELSEWHERE, FailedSample
from mindvl_data.shards.files import ShardFiles
from mindvl_data.shards.location import shown
from mindvl_data.shards.reading import read_samples
from mindvl_data.tokenization import Tokenizer
from mindvl_data.types import Batch, PackedSample, RawSample, SampleReference, TokenizedSample

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 5 * 8  # ids, labels and three axes of positions, int64


@dataclass(frozen=True, kw_only=True)
class BuiltPack:
    """A built pack and the samples of it that failed."""

    batch: Batch
    failed: tuple[FailedSample, ...]
    num_bytes: int  # of its tensors


class PackBuilder:
    """Builds packs of the data order; safe to call from any thread.

    Args:
        with_pixels: False builds packs with grids and without patches.
        vocab_size: Number of rows of the model's embedding; larger token ids are refused.
        pin_memory: Whether tensors are in pinned memory.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: Sequence[SourceIndex],
        *,
        tokenizer: Tokenizer,
        files: ShardFiles,
        position_kind: PositionKind,
        with_pixels: bool = True,
        vocab_size: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._config = config
        self._with_pixels = with_pixels
        self._vocab_size = vocab_size
        self._pin_memory = pin_memory
        self._sources = sources
        self._tokenizer = tokenizer
        self._files = files
        self._position_kind: PositionKind = position_kind
        self._of_thread = threading.local()

    def expected_bytes(self, pack: Pack) -> int:
        """Estimate of the bytes of the pack's tensors, from the data order alone.

        The data order does not distinguish images from videos, whose patches are twice as large.
        """
        patches, tokens = sum(sample.patches for sample in pack), sum(sample.length for sample in pack)
        patches *= self._with_pixels
        return patches * self._config.image.patch_dim + tokens * _BYTES_PER_TOKEN

    def build(self, step: int, pack: Pack, masked: Collection[int] = ()) -> BuiltPack:
        """Build the tensors of a pack.

        Args:
            masked: Indices of samples in the pack that become placeholders because another rank failed on them.

        Raises:
            DataError: A shard cannot be read, or a token id lies outside the vocabulary. An error in a single sample is
                not raised but returned in `BuiltPack.failed`.
        """
        encoded = [
            (ordered, raw, SampleError(FAILED_ELSEWHERE) if index in masked else self._encode(ordered, raw))
            for index, (ordered, raw) in enumerate(zip(pack, self._read(pack), strict=True))
        ]
        num_patches = self._with_pixels * sum(
            image_patches(raw, encoding)
            for _, raw, encoding in encoded
            if isinstance(raw, RawSample) and isinstance(encoding, Encoding)
        )
        buffer = PatchBuffer(num_patches, self._config.image.patch_dim, self._scratch())
        decoded = [self._decode(ordered, raw, encoding, buffer, step) for ordered, raw, encoding in encoded]
        batch = collate(
            PackedSample(samples=tuple(d[0] for d in decoded), references=tuple(d[1] for d in decoded)),
            step=step,
            position_kind=self._position_kind,
            pad_id=self._tokenizer.pad_id,
            image_pad_id=self._tokenizer.image_pad_id,
            video_pad_id=self._tokenizer.video_pad_id,
            pad_multiple=self._config.packing.pad_multiple,
            patch_dim=self._config.image.patch_dim,
            spatial_merge_size=self._config.image.spatial_merge_size,
            pixel_values=buffer.since(0),
            vocab_size=self._vocab_size,
        )
        tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
        return BuiltPack(
            batch=batch.pin_memory() if self._pin_memory else batch,
            failed=tuple(d[2] for d in decoded if d[2] is not None),
            num_bytes=sum(t.nbytes for t in tensors),
        )

    def _read(self, pack: Pack) -> list[RawSample | SampleError]:
        """Read all samples of the pack, in its order; samples of one shard are read together."""
        by_shard: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, ordered in enumerate(pack):
            by_shard[ordered.source, ordered.shard].append(number)
        read: dict[int, RawSample | SampleError] = {}
        for (source, shard), numbers in by_shard.items():
            index = self._sources[source].index.shards[shard]
            raw = read_samples(index, [pack[n].sample_index for n in numbers], self._files)
            read.update(zip(numbers, raw, strict=True))
        return [read[number] for number in range(len(pack))]

    def _scratch(self) -> Scratch:
        if not hasattr(self._of_thread, "scratch"):
            self._of_thread.scratch = Scratch()
        scratch: Scratch = self._of_thread.scratch
        return scratch

    def _encode(self, ordered: OrderedSample, raw: RawSample | SampleError) -> Encoding | SampleError:
        """Encode without pixels, so that the memory for the pack's patches can be allocated before decoding."""
        if isinstance(raw, SampleError):
            return raw
        try:
            encoding = encode_sample(raw, rules=self._sources[ordered.source].rules, tokenizer=self._tokenizer)
        except SampleError as error:
            return error
        if encoding.num_tokens != ordered.length:
            return SampleError(f"has {encoding.num_tokens} tokens, but {ordered.length} were indexed")
        if encoding.num_patches > ordered.patches:
            return SampleError(f"has {encoding.num_patches} patches, but {ordered.patches} were indexed")
        return encoding

    def _decode(
        self,
        ordered: OrderedSample,
        raw: RawSample | SampleError,
        encoding: Encoding | SampleError,
        buffer: PatchBuffer,
        step: int,
    ) -> tuple[TokenizedSample, SampleReference, FailedSample | None]:
        source = self._sources[ordered.source]
        shard = source.index.shards[ordered.shard]
        key = raw.key if isinstance(raw, RawSample) else ""
        failed: FailedSample | None = None
        try:
            if isinstance(encoding, SampleError):
                raise encoding
            assert isinstance(raw, RawSample)
            tokenized = decode_sample(
                raw, encoding, tokenizer=self._tokenizer, buffer=buffer, with_pixels=self._with_pixels
            )
        except SampleError as error:
            logger.warning(
                "%s: sample %d (source %s, key %r) failed to decode: %s. A placeholder without loss tokens replaces it.",
                shown(shard.path), ordered.sample_index, source.name, key, error,
            )  # fmt: skip
            failed = FailedSample(
                step=step, source=source.name, shard=shard.name, sample_index=ordered.sample_index, key=key, reason=str(error),
                epoch=ordered.epoch,
            )  # fmt: skip
            patch_dim, pad_id = self._config.image.patch_dim, self._tokenizer.pad_id
            tokenized = placeholder(ordered.length, patch_dim=patch_dim, pad_id=pad_id)
        reference = SampleReference(
            source=source.name, epoch=ordered.epoch, shard=shard.name, sample_index=ordered.sample_index, key=key,
            length=ordered.length, num_images=len(tokenized.image_grid_thw),
            num_videos=len(tokenized.video_grid_thw), failed=failed is not None,
        )  # fmt: skip
        return tokenized, reference, failed
