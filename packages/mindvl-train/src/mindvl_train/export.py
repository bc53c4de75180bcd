# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of any layout to a transformers folder.

Comes after training; needs one process and the memory of one model.
"""

from pathlib import Path
from typing import Any, Literal

from mindvl_model import MindVLConfig, config_from_json, enter


def export_checkpoint(
    source: Path,
    destination: Path,
    *,
    tokenizer: Path | None = None,
    dtype: Literal["fp32", "bf16"] | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> None:
    """Write the newest checkpoint of a run folder, or a checkpoint, as a folder that transformers loads.

    Args:
        tokenizer, min_pixels, max_pixels: In place of what the run was trained with.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        ModelError: The destination exists.
    """
    enter()
    from mindvl_model.hf.export import export_hf_folder
    from mindvl_model.hf.processor_files import ProcessorSettings, VideoSettings
    from mindvl_model.megatron.blocks import Layout
    from mindvl_model.megatron.process import single_process
    from mindvl_model.model import MindVLModel
    from mindvl_train import checkpoints
    from mindvl_train.weights import DTYPES

    checkpoint = checkpoints.newest(source)
    manifest = checkpoints.read_manifest(checkpoint)
    config = model_config(manifest)
    run = manifest["run"]
    image = run["data"]["image"]
    with single_process():
        model = MindVLModel(config, Layout(dtype=DTYPES[run["precision"]]))
        checkpoints.load_weights(checkpoint, model)
        export_hf_folder(
            model,
            config,
            destination,
            tokenizer=tokenizer or Path(run["data"]["tokenizer"]),
            processor=ProcessorSettings(
                min_pixels=min_pixels or image["min_pixels"],
                max_pixels=max_pixels or image["max_pixels"],
                video=VideoSettings(**run["data"]["video"]) if "video" in run["data"] else VideoSettings(),
            ),
            dtype=DTYPES[dtype] if dtype else None,
        )


def model_config(manifest: dict[str, Any]) -> MindVLConfig:
    """The model a manifest describes."""
    return config_from_json(manifest["model"])
