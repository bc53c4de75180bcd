# SPDX-License-Identifier: Apache-2.0
"""Keys of vision_config in config.json for each vision encoder, and the image settings of the processor of a directory.

Used by the modules that read and write whole directories. The keys are data of the registry (vision/registry.py).
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindvl_model.errors import ModelError, WeightError
from mindvl_model.hf.config_keys import MAX_LAYERS, MAX_NUMBER, Keys, read_keys, unsupported_model
from mindvl_model.hf.image_processor import image_processor
from mindvl_model.hf.whole_models import WHOLE_MODELS
from mindvl_model.vision.entries import DEFAULT_KIND, VISION_ENTRIES
from mindvl_model.vision_config import VisionConfig

_PATCHES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
_RESAMPLE = (3, "bicubic")
_FIRST = VISION_ENTRIES[DEFAULT_KIND]  # the image processor of all encoders in transformers has its values as defaults
_PROCESSOR_DEFAULTS = {
    **{key: _FIRST.published.defaults[field] for key, field in _PATCHES.items()},
    **{name: _FIRST.defaults[name] for name in ("image_mean", "image_std")},
}
_LISTS = ("full_attention_layers", "deepstack_layers")


def vision_kind(keys: Keys) -> str:
    """The vision encoder of a section vision_config, from its model_type.

    Raises:
        WeightError: There is no such vision encoder.
    """
    model_type = keys.take("model_type", None)
    kinds = {entry.published.model_type: kind for kind, entry in VISION_ENTRIES.items()}
    if model_type is None:
        return DEFAULT_KIND
    if not isinstance(model_type, str) or model_type not in kinds:
        raise WeightError(
            f"{keys.where}: model_type={model_type!r:.60} is not supported, only {', '.join(kinds)} are. Use another "
            "directory."
        )
    return kinds[model_type]


def directory_encoder(path: Path) -> VisionConfig | None:
    """The vision encoder of a directory with a whole model; None: another directory, which may have no config.json.

    Raises:
        WeightError: A key of the encoder is missing, or its value is invalid or not supported.
    """
    kind = directory_kind(path)
    if kind is None:
        return None
    keys = read_keys(path).section("vision_config")
    try:
        return read_vision(keys, path, kind)
    except WeightError:
        raise
    except ModelError as error:
        raise unsupported_model(error, keys.where) from error


def directory_kind(path: Path) -> str | None:
    """The kind of the vision encoder of a directory; None: there is none, or it is not supported.

    Raises:
        WeightError: config.json is damaged.
    """
    if not (path / "config.json").is_file():
        return None
    keys = read_keys(path)
    model_type, vision = keys.values.get("model_type"), keys.values.get("vision_config")
    if model_type == "mindvl" and isinstance(vision, dict):
        return vision_kind(keys.section("vision_config"))
    whole = WHOLE_MODELS.get(model_type) if isinstance(model_type, str) else None
    return None if whole is None else whole.vision


def read_vision(keys: Keys, path: Path, kind: str) -> VisionConfig:
    """Read the configuration of a vision encoder from vision_config; the processor has mean and standard deviation.

    Raises:
        WeightError: A key is missing, or its value is invalid or not supported.
    """
    # The defaults are those of transformers, because published directories omit keys with default values.
    published = VISION_ENTRIES[kind].published
    rope = Keys(keys.take("rope_parameters", None) or {}, f"{keys.where}: rope_parameters")
    rope.only("rope_type", "axial", "default")
    theta = rope.number("rope_theta", VisionConfig.rotary_base, whole=False)
    rope.check_remaining()
    for key, values in published.only.items():
        keys.only(key, *values)
    sizes: dict[str, Any] = {}
    for field, key in published.keys.items():
        default = [published.defaults[field]] if field in published.defaults else []
        if field in _LISTS:
            sizes[field] = keys.numbers(key, *default)
        elif field == "in_channels":
            sizes[field] = keys.number(key, keys.take("in_chans", *default))
        else:
            sizes[field] = keys.number(key, *default, most=MAX_LAYERS if field == "num_layers" else MAX_NUMBER)
    # Transformers ignores layers that do not exist, such as defaults of small models.
    if "full_attention_layers" in sizes:
        sizes["full_attention_layers"] = tuple(
            one for one in sizes["full_attention_layers"] if one < sizes["num_layers"]
        )
    deviation = keys.number("initializer_range", 0.02, whole=False, least=0)
    vision = VisionConfig(kind=kind, **sizes, rotary_base=theta, init_std=deviation)  # type: ignore[arg-type]
    return _with_image_settings(vision, path)


def write_vision(vision: VisionConfig, output_size: int) -> dict[str, Any]:
    """Return the keys of a vision encoder that whole models of every form share.

    Args:
        output_size: Size of a visual token.
    """
    keys = {key: getattr(vision, field) for field, key in vision.entry.published.keys.items()}
    lists = {key: list(value) for key, value in keys.items() if isinstance(value, tuple)}
    return keys | lists | {"out_hidden_size": output_size}


def _with_image_settings(vision: VisionConfig, path: Path) -> VisionConfig:
    """Set image mean and standard deviation from the processor of the directory, if it has one.

    Raises:
        WeightError: The processor prepares images for another encoder, or in a way that is not supported.
    """
    images = image_processor(path)
    if images is None:
        return vision
    for key, field in _PATCHES.items():
        stored, expected = images.take(key, _PROCESSOR_DEFAULTS[key]), getattr(vision, field)
        if stored != expected:
            raise WeightError(
                f"{images.where}: {key}={stored!r:.60}, but config.json has {field}={expected}. Download both files again."
            )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        images.only(name, True, None)
    images.only("resample", *_RESAMPLE, None)
    factor = images.number("rescale_factor", 1 / 255, whole=False)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise images.unsupported("rescale_factor", factor, "1 / 255")
    mean, deviation = (
        images.numbers(name, _PROCESSOR_DEFAULTS[name], count=3, whole=False) for name in ("image_mean", "image_std")
    )
    if not all(deviation):
        raise images.unsupported("image_std", deviation, "a list of 3 numbers above 0")
    return replace(vision, image_mean=mean, image_std=deviation)
