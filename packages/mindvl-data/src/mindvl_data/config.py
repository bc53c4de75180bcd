# SPDX-License-Identifier: Apache-2.0
"""What a user says about data: sources and weights, image budgets, pack sizes.

Read by the data_order and the loader; YAML becomes these classes in mindvl-cli, never here.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

MOST_PIXELS = 178_956_970  # of an image; Pillow opens none with more
# Beyond anything that is trained; a slip of the keyboard is refused before it takes memory or time.
_MAX_PIXELS = 1 << 40
_MAX_SEQ_LENGTH = 1 << 22
_MAX_COUNT = 1 << 20
_MAX_INTEGER = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """How an image becomes patches (Qwen2.5-VL's published values)."""

    min_pixels: int = 4 * 28 * 28  # smaller images are enlarged to at least this area
    max_pixels: int = 1280 * 28 * 28  # larger images are reduced to at most this area
    patch_size: int = 14  # side of one patch in pixels
    spatial_merge_size: int = 2  # side of the patch block that becomes one visual token
    decode_limit: int = 80_000_000  # pixels; larger images, and those that take over 5 bytes for each, are refused

    def __post_init__(self) -> None:
        _check_range(self, 1, 1024, "patch_size", "spatial_merge_size")
        _check_range(self, 1, _MAX_PIXELS, "max_pixels", "decode_limit")
        block = (self.patch_size * self.spatial_merge_size) ** 2
        if not block <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels} and max_pixels={self.max_pixels} leave no size to choose. "
                f"Use {block} <= min_pixels <= max_pixels."
            )
        if not 0 < self.decode_limit <= MOST_PIXELS:
            raise ValueError(f"decode_limit={self.decode_limit} pixels. Use 1 to {MOST_PIXELS}, the most Pillow opens.")

    @property
    def multiple(self) -> int:
        """Resized heights and widths are multiples of this many pixels."""
        return self.patch_size * self.spatial_merge_size

    @property
    def patch_dim(self) -> int:
        """Values in one patch: channels times patch area."""
        return 3 * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """How a video becomes frames and patches (Qwen2.5-VL's published values)."""

    fps: float = 2.0  # frames taken per second
    min_frames: int = 4  # shorter videos are sampled more densely, as far as they have frames
    max_frames: int = 768  # longer videos are sampled more sparsely
    min_pixels: int = 128 * 28 * 28  # of one frame
    max_pixels: int = 768 * 28 * 28  # of one frame
    total_pixels: int = 24_576 * 28 * 28  # of all frames, two counted as one; many frames are made smaller

    def __post_init__(self) -> None:
        _check_range(self, 0.0, 1e4, "fps")
        _check_range(self, 1, _MAX_COUNT, "max_frames")
        _check_range(self, 1, _MAX_PIXELS, "max_pixels", "total_pixels")
        if not self.fps > 0 or not 2 <= self.min_frames <= self.max_frames:
            raise ValueError(
                f"fps={self.fps}, min_frames={self.min_frames}, max_frames={self.max_frames} leave no choice. "
                "Use fps > 0 and 2 <= min_frames <= max_frames."
            )
        if not 28 * 28 <= self.min_pixels <= self.max_pixels or self.total_pixels < self.min_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels}, max_pixels={self.max_pixels}, total_pixels={self.total_pixels} leave "
                "no size to choose. Use 784 <= min_pixels <= max_pixels, and total_pixels of at least min_pixels."
            )


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """Everything that turns a sample of one source into tokens and patches, besides the tokenizer."""

    image: ImageConfig
    video: VideoConfig = field(default_factory=VideoConfig)
    max_tokens: int | None = None  # whole turns beyond this are left out; None: the sample stays as it is


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """The two budgets of a pack."""

    seq_length: int  # tokens in a pack, padding included
    max_patches: int | None = None  # patches in a pack; None: 1.25 times what the mixture asks for on average
    buffer_size: int = 256  # samples the packer chooses from; bounds how long a sample can wait
    pad_multiple: int = 8  # packs are padded to a multiple of this
    overflow: Literal["drop", "trim_turns"] = "drop"  # a sample longer than a pack: left out, or its last turns are
    balance_steps: int = 4  # steps whose packs are dealt together so that ranks see equal image loads; 1: none
    balance_width: int = (
        8  # packs that run side by side when loads are balanced; part of the recipe, not of the cluster
    )

    def __post_init__(self) -> None:
        _check_range(self, 1, _MAX_COUNT, "pad_multiple", "balance_width")
        _check_range(self, 0, _MAX_SEQ_LENGTH, "seq_length")
        _check_range(self, 0, _MAX_PIXELS, "max_patches")
        _check_range(self, 1, 1 << 16, "buffer_size")  # each sample is chosen among all of these
        _check_range(self, 1, 1 << 10, "balance_steps")  # all of these are planned before the first is trained
        if self.seq_length <= 0 or self.seq_length % self.pad_multiple:
            raise ValueError(
                f"seq_length={self.seq_length} is not a positive multiple of pad_multiple={self.pad_multiple}. "
                f"Use {max(1, self.seq_length // self.pad_multiple) * self.pad_multiple}."
            )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One dataset of the mixture."""

    name: str  # appears in reports, logs and the ledger
    path: (
        str | Path
    )  # directory of indexed shards, or an address as s3://bucket/photos (str first: a Path eats a slash)
    weight: float = 1.0  # share of the mixture, relative to the other sources
    max_epochs: int | None = None  # how often each sample may be used; None: as often as the mixture asks
    min_pixels: int | None = None  # overrides image.min_pixels for this source
    max_pixels: int | None = None  # overrides image.max_pixels for this source
    first: int | None = None  # use only this many samples, the first in the order of the index
    fraction: float | None = None  # use only this share of the samples, the same ones in every epoch

    def __post_init__(self) -> None:
        if isinstance(self.path, str) and "://" not in self.path:
            object.__setattr__(self, "path", Path(self.path))
        _check_range(self, 1, _MAX_PIXELS, "min_pixels", "max_pixels", "first", "max_epochs")
        _check_range(self, 0.0, 1e15, "weight")
        if (self.first is not None and self.first < 1) or (self.fraction is not None and not 0 < self.fraction <= 1):
            raise ValueError(
                f"first={self.first} and fraction={self.fraction} of source {self.name!r} use nothing. "
                "Use first >= 1 and 0 < fraction <= 1, or leave them out."
            )
        if not self.weight > 0:
            raise ValueError(
                f"weight={self.weight} of source {self.name!r} is not positive. Remove the source instead."
            )


def source_image(image: ImageConfig, source: SourceConfig) -> ImageConfig:
    """The image budget of one source: the mixture's, with the source's own limits where it has any.

    Raises:
        ValueError: The limits leave no size to choose; the message names the source.
    """
    try:
        return replace(
            image,
            min_pixels=image.min_pixels if source.min_pixels is None else source.min_pixels,
            max_pixels=image.max_pixels if source.max_pixels is None else source.max_pixels,
        )
    except ValueError as error:
        raise ValueError(f"source {source.name!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How shards in an object store are read (sources whose path is an address)."""

    cache: Path | None = None  # directory that keeps what was fetched; needed for sources in an object store
    cache_bytes: int = 100 * 10**9  # the least recently used is removed beyond this
    retries: int = 5  # of one request, waiting twice as long each time
    timeout_s: float = 30.0  # of one request, which fetches at most 16 MiB
    # for fsspec's file system, by protocol, such as {"s3": {"endpoint_url": ...}}; secrets are better left to the
    # machine, as a recipe is saved with every checkpoint
    options: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _coerce_paths(self, "cache")
        _check_range(self, 0, _MAX_INTEGER, "cache_bytes")
        _check_range(self, 0, 30, "retries")
        _check_range(self, 1e-3, 1e6, "timeout_s")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Everything that decides which sample is trained on when; the plan is a pure function of it and the index."""

    sources: tuple[SourceConfig, ...]  # the mixture
    tokenizer: Path  # directory with tokenizer files and a chat template, as transformers saves them
    packing: PackingConfig  # budgets of a pack
    image: ImageConfig = field(default_factory=ImageConfig)  # budgets of an image
    video: VideoConfig = field(default_factory=VideoConfig)  # budgets of a video
    store: StoreConfig = field(default_factory=StoreConfig)  # how object stores are read
    seed: int = 0  # decides the order of samples
    weight_unit: Literal["samples", "tokens"] = "samples"  # what the weights count
    text_share: float | None = None  # share of text-only sources, e.g. 0.2; None: as the weights say
    shuffle_window: int = 65_536  # samples shuffled together after shards were shuffled; bounds how far reads spread
    num_threads: int = 2  # decode threads; 0 decodes in the calling thread
    prefetch_packs: int = 8  # packs made ahead of the training step
    prefetch_bytes: int = 1 << 30  # decoded bytes that wait at most; one pack is always made
    order_ahead_steps: int = 16  # steps planned ahead in the background
    # the run stops when a rank could not decode more than this share of its samples, counted since it was started
    max_failed_share: float = 0.01
    audit_log: Path | None = None  # one JSON line for every step handed out; a log belongs to one run
    quarantine_log: Path | None = None  # one JSON line for every sample that could not be decoded

    def __post_init__(self) -> None:
        _coerce_paths(self, "tokenizer", "audit_log", "quarantine_log")
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources is empty. Name at least one directory of indexed shards.")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"sources {twice} appear twice. Give every source its own name.")
        for source in self.sources:
            source_image(self.image, source)
        _check_range(self, 0.0, 1.0, "text_share", "max_failed_share")
        _check_range(self, 0, _MAX_INTEGER, "seed")
        _check_range(self, 0, 1 << 12, "num_threads")
        _check_range(self, 1, _MAX_COUNT, "prefetch_packs", "order_ahead_steps")
        _check_range(self, 1, _MAX_INTEGER, "prefetch_bytes", "shuffle_window")


def _check_range(config: object, low: float, high: float, *names: str) -> None:
    """Refuse fields outside of [low, high]; None is always allowed, NaN never."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name}={value} must be between {low} and {high}.")


def _coerce_paths(config: Any, *names: str) -> None:
    for name in names:
        if isinstance(getattr(config, name), str):
            object.__setattr__(config, name, Path(getattr(config, name)))
