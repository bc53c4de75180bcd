# SPDX-License-Identifier: Apache-2.0
"""Export a model to a directory that transformers can load.

Used after training; merging, evaluation and serving read the directory. A whole model of transformers (whole_models.py) is
written as its directory, which other tools support; any other combination needs the three files of remote code.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.hf.config_json import hf_config
from mindvl_model.hf.processor_files import ProcessorSettings, write_mindvl_processor, write_published_processor
from mindvl_model.hf.whole_models import WHOLE_MODELS
from mindvl_model.parameters import named_tensors
from mindvl_model.weights.directory import as_dtype, new_directory, write_weights
from mindvl_model.weights.names import published_name, weight_rules
from mindvl_model.weights.sharding import split

REMOTE_CODE = ("configuration_mindvl.py", "modeling_mindvl.py", "processing_mindvl.py")


def export_hf_directory(
    model: torch.nn.Module,
    config: MindVLConfig,
    out: Path,
    *,
    tokenizer: Path,
    processor: ProcessorSettings,
    dtype: torch.dtype | None = None,
) -> None:
    """Export a whole model in one process, without parallelism; see write_hf_directory for the arguments."""
    parameters = named_tensors(model)
    stored = next(iter(parameters.values())).dtype
    write_hf_directory(
        lambda name: parameters[name].detach(),
        stored,
        config,
        out,
        tokenizer=tokenizer,
        processor=processor,
        dtype=dtype,
    )


def write_hf_directory(
    read: Callable[[str], Tensor],
    stored: torch.dtype,
    config: MindVLConfig,
    out: Path,
    *,
    tokenizer: Path,
    processor: ProcessorSettings,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 4 << 30,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Export a model one parameter at a time; `out` is renamed into place once it is complete.

    Args:
        read: Returns a whole parameter by name; called once per parameter.
        stored: Data type of the parameters.
        config: Configuration of the model.
        out: Directory to create.
        tokenizer: Directory with a transformers tokenizer and its chat template.
        processor: Image and video settings of the exported processor.
        dtype: Data type of the written weights; None: as stored.
        shard_bytes: Maximum size of a weight file in bytes; a larger tensor gets its own file.
        progress: Called with the number of written parameters and their total.

    Raises:
        ModelError: `out` exists or cannot be written, `tokenizer` holds no tokenizer, or transformers cannot represent
            the model.
    """
    if out.exists():
        raise ModelError(f"{out}: already exists. Choose a new directory, or remove it first.")
    if not (tokenizer / "tokenizer_config.json").is_file():
        raise ModelError(f"{tokenizer}: contains no tokenizer. Set --tokenizer to the tokenizer directory of the run.")
    document = hf_config(config, dtype or stored)

    def tensors() -> Iterable[tuple[str, Tensor]]:
        whole = WHOLE_MODELS.get(document["model_type"])
        published = whole is not None and whole.published_names
        rules = weight_rules(config)
        for done, rule in enumerate(rules):
            target = None if rule.param_name.endswith("expert_bias") else dtype  # always float32, as in transformers
            for name, tensor in split(rule, read(rule.param_name)):
                yield published_name(name) if published else name, as_dtype(tensor, target)
            progress(done + 1, len(rules))

    with new_directory(out) as directory:
        write_weights(directory, tensors(), shard_bytes)
        _write_documents(directory, document, config, tokenizer, processor)


def _write_documents(
    directory: Path, document: dict[str, Any], config: MindVLConfig, tokenizer: Path, processor: ProcessorSettings
) -> None:
    """Write all files except the weights."""
    published = document["model_type"] in WHOLE_MODELS
    write_processor = write_published_processor if published else write_mindvl_processor
    write_processor(directory, tokenizer, processor, config.vision)
    (directory / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    generation = {"eos_token_id": config.tokens.end_of_turn, "pad_token_id": config.tokens.pad, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
    for name in () if published else REMOTE_CODE:
        shutil.copyfile(Path(__file__).with_name(name), directory / name)
