# SPDX-License-Identifier: Apache-2.0
"""Configuration of the data: sources and weights, image and video budgets, packing.

Used by the data order and the loader. mindvl-cli creates these classes from YAML.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from mindvl_data.preprocessing import WITHOUT_MODEL, CoordinateUnit, FrameSelection, PixelBudget, Preprocessing

MOST_PIXELS = 178_956_970  # of an image; Pillow's limit
# Larger than any useful value, so that a typing error is refused before it costs memory or time.
_MAX_PIXELS = 1 << 40
_MAX_SEQ_LENGTH = 1 << 22
_MAX_COUNT = 1 << 20
_MAX_INTEGER = (1 << 63) - 1
_OF_MODEL: Any = None  # the default is that of the model

C = TypeVar("C", "ImageConfig", "VideoConfig")


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """How an image is divided into patches. Fields without a value are those of the model, or without one Qwen2.5-VL's.

    Stored lengths are identified by `repr`, so a field that changes no length has repr=False; `coordinates`, which earlier
    versions lack, is left out where it has its default.
    """

    # Smaller images are enlarged to at least this area; default: 4 visual tokens.
    min_pixels: int = _OF_MODEL
    # Larger images are reduced to at most this area; default: 1280 visual tokens.
    max_pixels: int = _OF_MODEL
    patch_size: int = _OF_MODEL  # side of one patch in pixels; default: that of the model
    # Side of the patch block that becomes one visual token; default: that of the model.
    spatial_merge_size: int = _OF_MODEL
    # Maximum pixels of an image; larger images fail to decode, and so do those that need more than 5 bytes of memory
    # per pixel of this limit.
    decode_limit: int = 80_000_000
    # Decode a JPEG that is reduced to half its size or less at a fraction of its size (DCT scaling): several times
    # faster, with slightly different pixels and the same number of visual tokens.
    jpeg_scaling: bool = field(default=False, repr=False)
    # Unit of points and boxes in texts. absolute: pixels of the resized image, as Qwen2.5-VL; relative: thousandths of its
    # width and height, as Qwen3-VL; default: as the model.
    coordinates: CoordinateUnit = _OF_MODEL

    def __post_init__(self) -> None:
        _fill(self, WITHOUT_MODEL.image_fields(self.patch_size, self.spatial_merge_size))
        _check_range(self, 1, 1024, "patch_size", "spatial_merge_size")
        _check_range(self, 1, _MAX_PIXELS, "max_pixels", "decode_limit")
        block = (self.patch_size * self.spatial_merge_size) ** 2
        if not block <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"min_pixels, max_pixels: {self.min_pixels} and {self.max_pixels} allow no image size. "
                f"Use {block} <= min_pixels <= max_pixels."
            )
        if self.decode_limit > MOST_PIXELS:
            raise ValueError(
                f"decode_limit: must be at most {MOST_PIXELS}, Pillow's limit, got {self.decode_limit}. Lower it."
            )

    def __repr__(self) -> str:
        shown = {one.name for one in fields(self) if one.repr}
        values = [f"{name}={value!r}" for name, value in self.settings().items() if name in shown]
        return f"{type(self).__name__}({', '.join(values)})"

    def settings(self) -> dict[str, Any]:
        """The fields by name, without those that earlier versions lack where they have their default."""
        defaults = {"jpeg_scaling": False, "coordinates": WITHOUT_MODEL.coordinates}
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}

    @property
    def multiple(self) -> int:
        """Resized heights and widths are multiples of this many pixels."""
        return self.patch_size * self.spatial_merge_size

    @property
    def patch_dim(self) -> int:
        """Values in one patch: channels times patch area."""
        return 3 * self.patch_size**2

    def for_model(self, model: Preprocessing) -> "ImageConfig":
        """The same with the values of a model in the fields that were not given."""
        return _with_defaults(self, model.image_fields())


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """How a video becomes frames and patches. Fields without a value are those of the model, or without one Qwen2.5-VL's.

    `repr`, which identifies stored lengths, leaves out the last three fields where they have their default.
    """

    fps: float = _OF_MODEL  # Frames taken per second; default: 2.
    min_frames: int = _OF_MODEL  # Minimum number of sampled frames; a video with fewer frames is used whole.
    max_frames: int = _OF_MODEL  # Maximum number of sampled frames; longer videos are sampled more sparsely.
    min_pixels: int = _OF_MODEL  # Minimum area in pixels of a frame, or with budget: whole of all frames.
    max_pixels: int = _OF_MODEL  # Maximum area in pixels of a frame, or with budget: whole of all frames.
    # With budget: per_frame, maximum of frame area in pixels times half the number of frames (two frames share a patch);
    # frames are reduced to fit, but not below min_pixels.
    total_pixels: int = _OF_MODEL
    # stride: an even number of frames, each the first of an equal share; endpoints: any number of frames, equally spaced
    # from the first to the last; default: as the model.
    frames: FrameSelection = _OF_MODEL
    # per_frame: the pixel limits are those of a frame; whole: those of all frames together; default: as the model.
    budget: PixelBudget = _OF_MODEL
    # The time of each temporal patch precedes its visual tokens in the text; default: as the model.
    timestamps: bool = _OF_MODEL

    def __post_init__(self) -> None:
        _fill(self, WITHOUT_MODEL.video_fields())
        _check_range(self, 0.0, 1e4, "fps")
        _check_range(self, 1, _MAX_COUNT, "max_frames")
        _check_range(self, 1, _MAX_PIXELS, "max_pixels", "total_pixels")
        if not self.fps > 0 or not 2 <= self.min_frames <= self.max_frames:
            raise ValueError(
                f"fps, min_frames, max_frames: {self.fps}, {self.min_frames}, {self.max_frames} allow no number of frames. "
                "Use fps > 0 and 2 <= min_frames <= max_frames."
            )
        least = WITHOUT_MODEL.token_pixels
        if not least <= self.min_pixels <= self.max_pixels or self.total_pixels < self.min_pixels:
            raise ValueError(
                f"min_pixels, max_pixels, total_pixels: {self.min_pixels}, {self.max_pixels}, {self.total_pixels} allow no "
                f"frame size. Use {least} <= min_pixels <= max_pixels, and total_pixels of at least min_pixels."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"

    def settings(self) -> dict[str, Any]:
        """The fields by name, without those that earlier versions lack where they have their default."""
        later, defaults = ("frames", "budget", "timestamps"), WITHOUT_MODEL.video_fields()
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if name not in later or value != defaults[name]}

    def for_model(self, model: Preprocessing) -> "VideoConfig":
        """The same with the values of a model in the fields that were not given."""
        return _with_defaults(self, model.video_fields())


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """Settings that convert a sample of one source into tokens and patches, besides the tokenizer."""

    image: ImageConfig
    video: VideoConfig = field(default_factory=VideoConfig)
    max_tokens: int | None = None  # turns beyond this are removed; None: no turn is removed


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Token and patch budget of a packed sequence (pack), and how packs are assigned to steps."""

    seq_length: int  # Length of a packed sequence in tokens, including padding.
    # Maximum image patches of a packed sequence; None: 1.25 times the mean number of patches per packed sequence in
    # the mixture.
    max_patches: int | None = None
    # Samples that the packer holds to choose from; a larger buffer packs better and delays samples longer.
    buffer_size: int = 256
    pad_multiple: int = 8  # Packed sequences are padded to a multiple of this many tokens.
    # Samples longer than seq_length: drop them, or remove their last turns.
    overflow: Literal["drop", "trim_turns"] = "drop"
    # Number of optimizer steps among which packed sequences are exchanged, so that ranks process similar numbers of image
    # patches; 1: no balancing.
    balance_steps: int = 4
    # Number of packed sequences with similar image load that follow each other in a step; use the largest data-parallel
    # size that you intend to use. It is not derived from the number of ranks, so that the data order does not depend on it.
    balance_width: int = 8

    def __post_init__(self) -> None:
        _check_range(self, 1, _MAX_COUNT, "pad_multiple", "balance_width")
        _check_range(self, 0, _MAX_SEQ_LENGTH, "seq_length")
        _check_range(self, 0, _MAX_PIXELS, "max_patches")
        _check_range(self, 1, 1 << 16, "buffer_size")  # the packer searches all of these for each sample
        _check_range(self, 1, 1 << 10, "balance_steps")  # all of these are packed before the first is trained
        if self.seq_length <= 0 or self.seq_length % self.pad_multiple:
            raise ValueError(
                f"seq_length: must be a positive multiple of pad_multiple={self.pad_multiple}, got {self.seq_length}. "
                f"Use {max(1, self.seq_length // self.pad_multiple) * self.pad_multiple}."
            )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One dataset of the mixture."""

    name: str  # name of this dataset in reports, logs and checkpoints
    # Directory of indexed shards, or an address such as s3://bucket/photos.
    path: str | Path
    weight: float = 1.0  # Relative share of the mixture, in samples or tokens (`data.weight_unit`).
    # Maximum number of passes over this source, after which no more samples are drawn from it; None: no limit.
    max_epochs: int | None = None
    min_pixels: int | None = None  # overrides image.min_pixels for this source
    max_pixels: int | None = None  # overrides image.max_pixels for this source
    first: int | None = None  # Use only this many samples, in the order of the index; None: all.
    fraction: float | None = None  # Use only this fraction of the samples, the same ones in every epoch; None: all.

    def __post_init__(self) -> None:
        if isinstance(self.path, str) and "://" not in self.path:
            object.__setattr__(self, "path", Path(self.path))
        _check_range(self, 1, _MAX_PIXELS, "min_pixels", "max_pixels", "first", "max_epochs")
        _check_range(self, 0.0, 1e15, "weight")
        if (self.first is not None and self.first < 1) or (self.fraction is not None and not 0 < self.fraction <= 1):
            raise ValueError(
                f"source {self.name!r}: first={self.first} and fraction={self.fraction} select no sample. "
                "Use first >= 1 and 0 < fraction <= 1, or omit them."
            )
        if not self.weight > 0:
            raise ValueError(
                f"source {self.name!r}: weight must be positive, got {self.weight}. Remove the source instead."
            )


def source_image(image: ImageConfig, source: SourceConfig) -> ImageConfig:
    """The image budget of one source: that of the mixture, overridden by the limits of the source.

    Raises:
        ValueError: The limits allow no image size; the message names the source.
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
    """Access to shards in an object store (sources whose path is an address)."""

    cache: Path | None = None  # directory for fetched data; required for sources in an object store
    cache_bytes: int = 100 * 10**9  # size of the cache; the least recently used data are removed beyond it
    retries: int = 5  # Retries per request, with a delay that doubles each time.
    timeout_s: float = 30.0  # Timeout in seconds of one request, which fetches at most 16 MiB.
    # Options of fsspec's file system by protocol, such as {"s3": {"endpoint_url": ...}}. Keep secrets in the
    # configuration of the machine: a recipe is saved with every checkpoint.
    options: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _coerce_paths(self, "cache")
        _check_range(self, 0, _MAX_INTEGER, "cache_bytes")
        _check_range(self, 0, 30, "retries")
        _check_range(self, 1e-3, 1e6, "timeout_s")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets, tokenizer and packing. With the index of the shards they determine which samples each step uses."""

    sources: tuple[SourceConfig, ...]  # Datasets to mix.
    tokenizer: Path  # directory with tokenizer files and a chat template, saved by transformers
    packing: PackingConfig  # Length of packed sequences and how they are assigned to steps.
    image: ImageConfig = field(default_factory=ImageConfig)  # Size limits of images.
    video: VideoConfig = field(default_factory=VideoConfig)  # Size limits and frame rate of videos.
    store: StoreConfig = field(default_factory=StoreConfig)  # Access to object stores.
    seed: int = 0  # Random seed of the data order.
    weight_unit: Literal["samples", "tokens"] = "samples"  # Whether weights are shares of samples or of tokens.
    # Total share of the sources without images and videos, in samples or tokens (`weight_unit`), such as 0.2; None:
    # from the weights.
    text_share: float | None = None
    # Shards are shuffled first, then samples within windows of this many samples; a smaller window reads fewer shards
    # at once.
    shuffle_window: int = 65_536
    num_threads: int = 2  # decode threads; 0 decodes in the calling thread
    prefetch_packs: int = 8  # Maximum number of packed sequences built ahead of training.
    # Maximum bytes of decoded data built ahead; one packed sequence is built even if it is larger.
    prefetch_bytes: int = 1 << 30
    order_ahead_steps: int = 16  # Optimizer steps of the data order computed in advance.
    # The run stops if more than this share of the samples that a rank has read since its start failed to decode; the
    # first 16 failures are tolerated.
    max_failed_share: float = 0.01
    # File with one JSON line per step; None: OUT/audit.jsonl with `mindvl train`, none otherwise.
    audit_log: Path | None = None
    # File with one JSON line per sample that failed to decode; None: OUT/quarantine.jsonl with `mindvl train`, none
    # otherwise.
    quarantine_log: Path | None = None

    def for_model(self, model: Preprocessing) -> "DataConfig":
        """The same with the preprocessing of a model in the fields of `image` and `video` that were not given."""
        return replace(self, image=self.image.for_model(model), video=self.video.for_model(model))

    def __post_init__(self) -> None:
        _coerce_paths(self, "tokenizer", "audit_log", "quarantine_log")
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources: the list is empty. Add at least one directory of indexed shards.")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"sources: the names {twice} are used twice. Give every source a unique name.")
        for source in self.sources:
            source_image(self.image, source)
        _check_range(self, 0.0, 1.0, "text_share", "max_failed_share")
        _check_range(self, 0, _MAX_INTEGER, "seed")
        _check_range(self, 0, 1 << 12, "num_threads")
        _check_range(self, 1, _MAX_COUNT, "prefetch_packs", "order_ahead_steps")
        _check_range(self, 1, _MAX_INTEGER, "prefetch_bytes", "shuffle_window")


def _fill(config: Any, defaults: dict[str, Any]) -> None:
    """Set the fields that were not given, and remember the others, which a model must not replace."""
    given = {name for name in defaults if getattr(config, name) is not None}
    object.__setattr__(config, "_given", given)
    for name in defaults.keys() - given:
        object.__setattr__(config, name, defaults[name])


def _with_defaults(config: C, defaults: dict[str, Any]) -> C:
    given: set[str] = config.__dict__["_given"]
    return replace(config, **{name: value for name, value in defaults.items() if name not in given})


def _check_range(config: object, low: float, high: float, *names: str) -> None:
    """Refuse fields outside [low, high]; None is allowed, NaN is not."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name}: must be between {low} and {high}, got {value}. Use a value in this range.")


def _coerce_paths(config: Any, *names: str) -> None:
    for name in names:
        if isinstance(getattr(config, name), str):
            object.__setattr__(config, name, Path(getattr(config, name)))
