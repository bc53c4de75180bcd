# SPDX-License-Identifier: Apache-2.0
"""Transformers directories to a mindvl checkpoint, one parameter at a time; export.py is the way back.

Comes before training: the result is what init.checkpoint takes. Parts may come from several directories, and what no directory
gives starts at random, as in training.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mindvl_data import load_tokenizer
from mindvl_model import MindVLConfig, ModelError, TokenConfig, WeightError, for_tokenizer, set_up_device
from mindvl_model.hf.directory_config import WHOLE_MODELS, config_from_directory, language_config_from_directory
from mindvl_model.hf.load import DirectorySource, LoadReport
from mindvl_model.parameters import PARTS, Part, initialize_parameter
from mindvl_model.weights.layout import Share, cut_of
from mindvl_model.weights.rules import WeightRule

FILE_BYTES = 4 << 30
NO_TOKENS = TokenConfig(image=0, vision_start=0, vision_end=0, end_of_turn=0, pad=0)  # until the tokenizer says them
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class ConvertSource:
    """Where the parts of a model come from; give `model`, or parts of it."""

    model: Path | None = None  # a transformers directory of a whole model
    vision: Path | None = None  # one whose vision encoder is taken
    language: Path | None = None  # one whose language model is taken

    def __post_init__(self) -> None:
        if (self.model is None) == (self.vision is None and self.language is None):
            raise ValueError(
                "give one directory of a whole model, or directories of vision and language. Keep one of both."
            )

    def directories(self) -> dict[Path, tuple[Part, ...]]:
        """Which parts each directory gives."""
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
    """What became of every tensor of the directories and every parameter of the model."""

    checkpoint: Path
    precision: str
    directories: dict[Path, LoadReport]
    fresh: tuple[str, ...]  # parameters that no directory gives; they start at random


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
    """Write `out`/checkpoints/step-00000000 from transformers directories; `out` appears whole or not at all.

    Args:
        config: The model, in place of the directories' configurations.
        tokenizer: The one the model will be used with; default: that of the directory with the language model. Tokens
            beyond the directory's vocabulary get rows at random.
        dtype: Precision of the checkpoint; default: bf16 where all weights are, else fp32, so that nothing is rounded.
        seed: Of what starts at random.
        file_bytes: Size of a tensor file; a larger tensor gets a file of its own.
        progress: Told how many parameters are written, and how many there are.

    Raises:
        ModelError: A directory is damaged, or its tensors do not fit the model; `out` exists or cannot be written.
    """
    set_up_device()
    from mindvl_model.megatron.process import single_process
    from mindvl_train.checkpoints.directory import newest_checkpoint, plain_json, save_weights
    from mindvl_train.megatron.tensor_files import stored_parameters, write_tensors
    from mindvl_train.resolved_run import DTYPES

    if out.exists():
        raise WeightError(f"{out}: exists already. Name a new directory or remove it first.")
    config = _config_of(source, config, tokenizer)
    tokenizer = tokenizer or _tokenizer_of(source)
    given = source.directories()
    directories = {path: DirectorySource(path, config, parts, seed=seed) for path, parts in given.items()}
    precision = dtype or _precision(directories)
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with single_process():
        places = stored_parameters(config, DTYPES[precision])
        from_directory = {rule.param_name: (rule, each) for each in directories.values() for rule in each.rules}
        for name, (rule, directory) in from_directory.items():
            directory.check(rule, places[name].shape)
        fresh = sorted(set(places) - set(from_directory))

        def tensors() -> Iterator[tuple[str, int, Tensor]]:
            for done, (name, place) in enumerate(places.items()):
                if name in from_directory:
                    rule, directory = from_directory[name]
                    yield from _pieces(rule, directory, place.shape[0], place.dtype)
                else:
                    tensor = torch.empty(place.shape, dtype=place.dtype)
                    initialize_parameter(name, tensor, config, seed)
                    yield name, 0, tensor
                progress(done + 1, len(places))

        described = {
            "model": plain_json(config),
            "run": {"precision": precision, "seed": seed, "data": _data(source, tokenizer)},
            "parents": [str(path) for path in directories],
        }
        try:
            save_weights(
                unfinished / "checkpoints", described, lambda out: write_tensors(out, places, tensors(), file_bytes)
            )
            os.replace(unfinished, out)
        except OSError as error:
            what = error.strerror or str(error)[:300]
            raise WeightError(f"{out}: cannot be written ({what}). Make room or name another directory.") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return ConvertReport(
        checkpoint=newest_checkpoint(out),
        precision=precision,
        directories={path: directory.report() for path, directory in directories.items()},
        fresh=tuple(fresh),
    )


def _pieces(
    rule: WeightRule, directory: DirectorySource, num_experts: int, dtype: torch.dtype
) -> Iterator[tuple[str, int, Tensor]]:
    """A parameter whole, or expert by expert."""
    if cut_of(rule.param_name) != "experts":
        yield rule.param_name, 0, directory.read(rule, dtype)
        return
    for expert in range(num_experts):
        share = Share(ep_rank=expert, ep_size=num_experts)
        yield rule.param_name, expert, directory.read(rule, dtype, share)


def _config_of(source: ConvertSource, given: MindVLConfig | None, tokenizer: Path | None) -> MindVLConfig:
    """The model, with ids and vocabulary of the tokenizer that is named, or that parts need."""
    if given is not None:
        config = given
    elif source.model is not None:
        config = config_from_directory(source.model)
        if tokenizer is None:  # the directory knows its own
            return config
    else:
        if source.vision is None or source.language is None:
            raise ModelError("vision and language are both needed to know the model. Name both, or a size.")
        whole = _json(source.language / "config.json").get("model_type") in WHOLE_MODELS
        config = MindVLConfig(
            vision=config_from_directory(source.vision).vision,
            language=language_config_from_directory(source.language),
            tokens=config_from_directory(source.language).tokens if whole else NO_TOKENS,
        )
    tokenizer = tokenizer or _tokenizer_of(source)
    if tokenizer is None:
        if given is None:
            raise WeightError(
                f"{source.language}: has no tokenizer, which gives the token ids. Name one (--tokenizer)."
            )
        return config
    loaded = load_tokenizer(tokenizer)
    return for_tokenizer(config, loaded.special_ids, len(loaded.hf))


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


def _data(source: ConvertSource, tokenizer: Path | None) -> dict[str, Any]:
    """What export.py wants to know of a run: tokenizer and image sizes, where the directories say them."""
    data: dict[str, Any] = {"tokenizer": None if tokenizer is None else str(tokenizer.absolute()), "image": {}}
    for directory in source.directories():
        for name in ("preprocessor_config.json", "processor_config.json"):
            stored = _json(directory / name) if (directory / name).is_file() else {}
            images = stored.get("image_processor", stored)
            size = images.get("size") or {}
            limits = {
                "min_pixels": images.get("min_pixels", size.get("shortest_edge")),
                "max_pixels": images.get("max_pixels", size.get("longest_edge")),
            }
            if all(isinstance(limit, int) for limit in limits.values()):
                data["image"] = limits
    return data


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        raise WeightError(f"{file}: there is no such file. Name a transformers model directory.") from None
    except (OSError, ValueError) as error:
        raise WeightError(f"{file}: not JSON ({error}). Fetch the file again.") from error
    if not isinstance(document, dict):
        raise WeightError(f"{file}: not a section of keys. Fetch the file again.")
    return document
