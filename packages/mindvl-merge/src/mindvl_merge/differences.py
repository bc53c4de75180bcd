# SPDX-License-Identifier: Apache-2.0
"""Differences between configurations, processors and Python files of two model directories.

Comes after files.py; tokenizers.py does the same for tokenizers, parents.py decides. A key of config.json counts as
one that affects the computation unless it is listed here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DirectoryError
from .files import read_json, regular_file, same_bytes
from .spellings import language_section, one_spelling, same_sections

MISSING = "absent"

_WITHOUT_EFFECT = {  # keys and sections of config.json; the merged model keeps the value of the first model
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "ep_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "label2id",
    "length_penalty",
    "max_length",
    "max_position_embeddings",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "sep_token_id",
    "seq_aux",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
}
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PIXELS = {  # last part of processor keys that affect the model input; size limits and class names do not
    "image_mean",
    "image_std",
    "merge_size",
    "patch_size",
    "resample",
    "rescale_factor",
    "temporal_patch_size",
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference between two directories."""

    file: str  # file name in the other directory
    key: str
    first: str  # value in the first directory, shortened for a message
    other: str
    is_refused: bool  # it affects the computation of the model


def config_differences(first: Path, other: Path, *, language_only: bool = False) -> list[Difference]:
    """Differences of config.json; sections are compared key by key, rotary embedding in any of its spellings.

    Args:
        language_only: Compare the language model alone, which one of the models may store without vision.

    Raises:
        DirectoryError: A file is damaged.
    """
    found = [_read(path, "config.json") for path in (first, other)]
    if (found[0] is None) != (found[1] is None):
        raise DirectoryError(
            f"{(first if found[0] is None else other) / 'config.json'}: the file is missing, so the models cannot be "
            "compared. Copy it from the model that these weights belong to."
        )
    if found[0] is None or found[1] is None:
        return []
    if language_only:
        values = [_flat(language_section(document), is_config=True) for document in found if document is not None]
        return [
            Difference(file="config.json", key=key, first=one, other=two, is_refused=_changes_language(key, one, two))
            for key, one, two in _differing(*values)
        ]
    values = [_flat(document, is_config=True) for document in same_sections(found[0], found[1])]
    return [
        Difference(file="config.json", key=key, first=one, other=two, is_refused=_changes_function(key, one, two))
        for key, one, two in _differing(*values)
    ]


def processor_differences(first: Path, other: Path) -> list[Difference]:
    """Differences of image and video processors, and of the settings of generation.

    Raises:
        DirectoryError: A file is damaged.
    """
    differences = []
    for name in (*_PROCESSOR_FILES, "generation_config.json"):
        one, two = _read(first, name), _read(other, name)
        if one is None or two is None:
            if one is not two:
                differences.append(_whole_file(name, is_in_first=two is None))
            continue
        for key, left, right in _differing(_flat(one), _flat(two)):
            last = _last(key)
            in_both = MISSING not in (left, right)  # newer versions write former defaults
            refused = in_both and name in _PROCESSOR_FILES and (last in _PIXELS or last.startswith("do_"))
            differences.append(Difference(file=name, key=key, first=left, other=right, is_refused=refused))
    return differences


def code_differences(first: Path, other: Path) -> list[Difference]:
    """Python files that differ; the merged model gets those of the first."""
    names = sorted({path.name for directory in (first, other) for path in directory.glob("*.py")})
    return [
        Difference(file=name, key=name, first="its code", other="other code", is_refused=False)
        for name in names
        if not same_bytes(first / name, other / name)
    ]


def shown(value: Any) -> str:
    """Format a value for a message."""
    return MISSING if value is None else f"{value!r:.80}"


def _changes_language(key: str, first: str, other: str) -> bool:
    """Whether a key of the language model matters; most defaults may be absent, those of positions may not."""
    if MISSING in (first, other) and not key.startswith("rope_parameters"):
        return False
    return _changes_function(key, first, other)


def _changes_function(key: str, first: str, other: str) -> bool:
    if key.endswith(".model_type") and MISSING in (first, other):  # of a section; older versions do not write it
        return False
    return not _WITHOUT_EFFECT.intersection(key.split("."))


def _read(path: Path, name: str) -> dict[str, Any] | None:
    return read_json(regular_file(path, name)) if (path / name).exists() else None


def _whole_file(name: str, *, is_in_first: bool) -> Difference:
    there = ("a file", MISSING)
    first, other = there if is_in_first else reversed(there)
    return Difference(file=name, key=name, first=first, other=other, is_refused=False)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key in sorted(first.keys() | other.keys()):
        if first.get(key) != other.get(key):
            yield key, shown(first.get(key)), shown(other.get(key))


def _flat(section: Mapping[str, Any], prefix: str = "", *, is_config: bool = False) -> dict[str, Any]:
    """Values by dotted key, without null values and defaults."""
    flat: dict[str, Any] = {}
    name = _last(prefix.removesuffix("."))
    items = one_spelling(section, name) if is_config and name != "rope_parameters" else section
    for key, value in items.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.", is_config=is_config)
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
