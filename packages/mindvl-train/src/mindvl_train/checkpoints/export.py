# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint of any parallel layout as a transformers directory; convert.py does the reverse.

Comes after training. Needs one process and memory for two of the largest parameters.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mindvl_model import MindVLConfig, ModelError, config_from_json, set_up_device

if TYPE_CHECKING:
    from mindvl_model.hf.processor_files import VideoSettings


def export_checkpoint(
    source: Path,
    destination: Path,
    *,
    tokenizer: Path | None = None,
    dtype: Literal["fp32", "bf16"] | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    shard_bytes: int = 4 << 30,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Export a checkpoint, or the newest checkpoint of a run directory, as a directory that transformers loads.

    A checkpoint of adapters becomes a directory that PEFT loads; the arguments about processor and files have no effect.

    Args:
        tokenizer, min_pixels, max_pixels: Override the values of the run.
        shard_bytes: Maximum size of a weight file; a larger tensor has its own file.
        progress: Called with the number of written parameters and their total number.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        ModelError: The destination exists.
    """
    set_up_device()
    from mindvl_model.hf.export import write_hf_directory
    from mindvl_model.hf.processor_files import ProcessorSettings
    from mindvl_model.megatron.process import single_process
    from mindvl_train.checkpoints.directory import newest_checkpoint, read_manifest
    from mindvl_train.checkpoints.restore import WeightReader
    from mindvl_train.errors import DamagedCheckpointError
    from mindvl_train.megatron.tensor_files import stored_parameters
    from mindvl_train.resolved_run import DTYPES

    checkpoint = newest_checkpoint(source)
    manifest = read_manifest(checkpoint)
    if manifest["run"].get("adapter") is not None:
        _export_adapters(checkpoint, manifest, destination, dtype)
        return
    config = model_config(manifest)
    image_sizes = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    try:
        stored, data = DTYPES[manifest["run"]["precision"]], manifest["run"]["data"]
        tokenizer = tokenizer or (None if data["tokenizer"] is None else Path(data["tokenizer"]))
        for name, size in image_sizes.items():
            known = None if size else data["image"].get(name)
            image_sizes[name] = size if known is None else int(known)
        video = _video_settings(data.get("video", {}))
        jpeg_scaling = data.get("image", {}).get("jpeg_scaling") is True
        # Runs of versions without this key had absolute coordinates for every encoder.
        unit = data.get("image", {}).get("coordinates", "absolute" if "patch_size" in data.get("image", {}) else None)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DamagedCheckpointError(f"{checkpoint}: manifest.json: section run has no valid {error!r}") from error
    if tokenizer is None:
        raise ModelError(f"{checkpoint}: was converted without a tokenizer. Set --tokenizer.")
    if None in image_sizes.values():
        raise ModelError(f"{checkpoint}: was converted without image sizes. Set --min-pixels and --max-pixels.")
    with single_process():
        stored_by_name = stored_parameters(config, stored)
        reader = WeightReader(checkpoint)
        write_hf_directory(
            lambda name: reader.read(name, stored_by_name[name]),
            stored,
            config,
            destination,
            tokenizer=tokenizer,
            processor=ProcessorSettings(
                **image_sizes,  # type: ignore[arg-type]
                jpeg_scaling=jpeg_scaling,
                coordinates=unit,
                video=video,
            ),
            dtype=DTYPES[dtype] if dtype else None,
            shard_bytes=shard_bytes,
            progress=progress,
        )


def _video_settings(stored: dict[str, Any]) -> "VideoSettings":
    """The video settings of a run; absent ones are those of the encoder."""
    from mindvl_model.hf.processor_files import VideoSettings

    found = {one.name: stored.get(one.name) for one in fields(VideoSettings)}
    for name, value in found.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ValueError(f"video.{name}: must be a number above 0, got {value!r:.60}.")
    return VideoSettings(**found)


def _export_adapters(
    checkpoint: Path, manifest: dict[str, Any], destination: Path, dtype: Literal["fp32", "bf16"] | None
) -> None:
    from mindvl_model.adapters.peft_export import write_peft_directory
    from mindvl_model.megatron.process import single_process
    from mindvl_train.adapters import adapter_of
    from mindvl_train.checkpoints.restore import WeightReader
    from mindvl_train.megatron.tensor_files import stored_parameters
    from mindvl_train.resolved_run import DTYPES

    config, (lora, parts) = model_config(manifest), adapter_of(manifest)
    base = (manifest.get("base") or {}).get("weights", {}).get("model")
    with single_process():
        stored = stored_parameters(config, DTYPES[manifest["run"]["precision"]], lora, parts)
        reader = WeightReader(checkpoint)
        write_peft_directory(
            destination,
            config,
            lora,
            parts,
            lambda name: reader.read(name, stored[name]),
            base=None if base is None else Path(base["path"]),
            dtype=DTYPES[dtype] if dtype else None,
        )


def model_config(manifest: dict[str, Any]) -> MindVLConfig:
    """The model configuration of a manifest."""
    return config_from_json(manifest["model"])
