# SPDX-License-Identifier: Apache-2.0
"""Convert transformers directories to a mindvl checkpoint, one parameter at a time; export.py does the reverse.

Comes before training: the result can be used as init.checkpoint. Parts may come from several directories; parameters
without a source are initialized randomly, as in training.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mindvl_data import load_tokenizer
from mindvl_model import MindVLConfig, ModelError, TokenConfig, WeightError, for_tokenizer, set_up_device
from mindvl_model.hf.directory_config import SUPPORTED, config_from_directory, language_config_from_directory
from mindvl_model.hf.image_processor import image_processor, pixel_limits
from mindvl_model.hf.load import DirectorySource, LoadReport
from mindvl_model.hf.processor_files import read_video_settings
from mindvl_model.parameters import PARTS, Part, initialize_parameter
from mindvl_model.weights.directory import new_directory
from mindvl_model.weights.rules import WeightRule
from mindvl_model.weights.sharding import Share, split_kind

FILE_BYTES = 4 << 30
NO_TOKENS = TokenConfig(image=0, vision_start=0, vision_end=0, end_of_turn=0, pad=0)  # before the tokenizer is known
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class ConvertSource:
    """Sources of the model parts: either `model`, or `vision` and/or `language`."""

    model: Path | None = None  # transformers directory of a whole model
    vision: Path | None = None  # transformers directory of the vision encoder
    language: Path | None = None  # transformers directory of the language model

    def __post_init__(self) -> None:
        if (self.model is None) == (self.vision is None and self.language is None):
            raise ValueError(
                "source: must be either one directory of a whole model, or directories of vision and language."
            )

    def directories(self) -> dict[Path, tuple[Part, ...]]:
        """The parts that are loaded from each directory."""
        if self.model is not None:
            return {self.model: PARTS}
        given: list[tuple[Path | None, Part]] = [(self.vision, "vision"), (self.language, "language")]
        taken: dict[Path, tuple[Part, ...]] = {}
        for directory, part in given:
            if directory is not None:
                taken[directory] = (*taken.get(directory, ()), part)
        return taken


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """Result of a conversion: use of every tensor of the directories and source of every parameter."""

    checkpoint: Path
    precision: str
    directories: dict[Path, LoadReport]
    fresh: tuple[str, ...]  # parameters without a source, initialized randomly


def convert_to_checkpoint(
    source: ConvertSource,
    out: Path,
    *,
    config: MindVLConfig | None = None,
    tokenizer: Path | None = None,
    dtype: Literal["fp32", "bf16"] | None = None,
    seed: int = 0,
    file_bytes: int = FILE_BYTES,
    progress: Progress = lambda done, total: None,
) -> ConvertReport:
    """Write `out`/checkpoints/step-00000000 from transformers directories; `out` is created atomically.

    Args:
        config: Model configuration; None: from the directories.
        tokenizer: Tokenizer of the model; None: that of the language model. Rows of new tokens are random.
        dtype: Precision of the checkpoint; None: bf16 if all weights are bf16, else fp32.
        seed: Seed of random initialization.
        file_bytes: Maximum size of a tensor file; a larger tensor has its own file.
        progress: Called with the number of written parameters and their total number.

    Raises:
        ModelError: A directory is damaged, or its tensors do not fit the model; `out` exists or cannot be written.
    """
    set_up_device()
    from mindvl_model.megatron.process import single_process
    from mindvl_train.checkpoints.directory import newest_checkpoint, plain_json, save_weights
    from mindvl_train.megatron.tensor_files import stored_parameters, write_tensors
    from mindvl_train.resolved_run import DTYPES

    if out.exists():
        raise WeightError(f"{out}: already exists. Use a new directory, or remove it first.")
    config = _config_of(source, config, tokenizer)
    tokenizer = tokenizer or _tokenizer_of(source)
    given = source.directories()
    directories = {path: DirectorySource(path, config, parts, seed=seed) for path, parts in given.items()}
    precision = dtype or _precision(directories)
    with single_process():
        stored = stored_parameters(config, DTYPES[precision])
        from_directory = {rule.param_name: (rule, each) for each in directories.values() for rule in each.rules}
        for name, (rule, directory) in from_directory.items():
            directory.check(rule, stored[name].shape)
        fresh = sorted(set(stored) - set(from_directory))

        def tensors() -> Iterator[tuple[str, int, Tensor]]:
            for done, (name, parameter) in enumerate(stored.items()):
                if name in from_directory:
                    rule, directory = from_directory[name]
                    yield from _pieces(rule, directory, parameter.shape[0], parameter.dtype)
                else:
                    tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
                    initialize_parameter(name, tensor, config, seed)
                    yield name, 0, tensor
                progress(done + 1, len(stored))

        described = {
            "model": plain_json(config),
            "run": {"precision": precision, "seed": seed, "data": _data(source, tokenizer, config)},
            "parents": [str(path) for path in directories],
        }
        with new_directory(out) as written:
            save_weights(
                written / "checkpoints", described, lambda to: write_tensors(to, stored, tensors(), file_bytes)
            )
    return ConvertReport(
        checkpoint=newest_checkpoint(out),
        precision=precision,
        directories={path: directory.report() for path, directory in directories.items()},
        fresh=tuple(fresh),
    )


def _pieces(
    rule: WeightRule, directory: DirectorySource, num_experts: int, dtype: torch.dtype
) -> Iterator[tuple[str, int, Tensor]]:
    """A whole parameter, or the weights of one expert after the other."""
    if split_kind(rule.param_name) != "experts":
        yield rule.param_name, 0, directory.read(rule, dtype)
        return
    for expert in range(num_experts):
        share = Share(ep_rank=expert, ep_size=num_experts)
        yield rule.param_name, expert, directory.read(rule, dtype, share)


def _config_of(source: ConvertSource, given: MindVLConfig | None, tokenizer: Path | None) -> MindVLConfig:
    """The model configuration with token ids and vocabulary size of the tokenizer."""
    if given is not None:
        config = given
    elif source.model is not None:
        config = config_from_directory(source.model)
        if tokenizer is None:  # token ids are those of the directory
            return config
    else:
        if source.vision is None or source.language is None:
            raise ModelError("source: vision and language are both required. Set both, or a model size.")
        whole = _json(source.language / "config.json").get("model_type") in SUPPORTED
        config = MindVLConfig(
            # Deepstack features are for the language model that was trained with them.
            vision=replace(config_from_directory(source.vision).vision, deepstack_layers=()),
            language=language_config_from_directory(source.language),
            tokens=config_from_directory(source.language).tokens if whole else NO_TOKENS,
        )
    tokenizer = tokenizer or _tokenizer_of(source)
    if tokenizer is None:
        if given is None:
            raise WeightError(f"{source.language}: has no tokenizer. Set --tokenizer: it defines the token ids.")
        return config
    loaded = load_tokenizer(tokenizer)
    return for_tokenizer(config, loaded.special_ids, loaded.vocab_size)


def _tokenizer_of(source: ConvertSource) -> Path | None:
    directory = source.model or source.language
    return directory if directory is not None and (directory / "tokenizer_config.json").is_file() else None


def _precision(directories: dict[Path, DirectorySource]) -> Literal["fp32", "bf16"]:
    stored: set[str] = set()
    for directory in directories.values():
        for rule in directory.rules:
            if not rule.param_name.endswith("expert_bias"):  # fp32 in every precision
                stored |= directory.stored_dtypes(rule)
    return "bf16" if stored == {"BF16"} else "fp32"


def _data(source: ConvertSource, tokenizer: Path | None, config: MindVLConfig) -> dict[str, Any]:
    """Tokenizer, image sizes and video settings of the directories, for export.py."""
    data: dict[str, Any] = {"tokenizer": None if tokenizer is None else str(tokenizer.absolute()), "image": {}}
    for directory in source.directories():
        data["image"] = pixel_limits(directory) or data["image"]
    if source.model is not None:
        images = image_processor(source.model)
        stored = {} if images is None else images.values
        data["image"] |= {name: stored[name] for name in ("jpeg_scaling", "coordinates") if name in stored}
        data["video"] = asdict(read_video_settings(source.model, config.vision))
    return data


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        raise WeightError(f"{file}: file does not exist. Use a transformers model directory.") from None
    except (OSError, ValueError) as error:
        raise WeightError(f"{file}: is not valid JSON ({error}). Download the file again.") from error
    if not isinstance(document, dict):
        raise WeightError(f"{file}: is not a JSON object. Download the file again.")
    return document
