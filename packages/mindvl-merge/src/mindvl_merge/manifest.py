# SPDX-License-Identifier: Apache-2.0
"""`merge.json`: what a merge read, how it combined it, what it wrote, and the command that repeats it.

Written last by run.py. The digests are those of digests.py: they do not depend on how tensors are distributed over files.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .config import DROPPING, WITH_BASE, MergeConfig
from .digests import ALGORITHM, model_digest, stored_digest
from .directory import ModelDirectory
from .headers import TensorInfo
from .sources import OutputTensor, Pairing

MANIFEST_NAME = "merge.json"
MANIFEST_FORMAT = 2


def manifest(
    config: MergeConfig,
    directories: Sequence[ModelDirectory],
    pairing: Pairing,
    records: Mapping[str, Mapping[str, Any]],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The content of `merge.json`.

    Args:
        records: For each output tensor `digest` and `sources`, the digests of its source tensors.
    """
    rules: list[dict[str, Any]] = []
    tensors = {}
    for tensor in pairing.outputs:
        rule = _rule(config, tensor)
        if rule not in rules:
            rules.append(rule)
        entry: dict[str, Any] = {"rule": rules.index(rule), "digest": records[tensor.info.name]["digest"]}
        others = {str(one.parent): one.name for one in tensor.sources if one.name != tensor.info.name}
        tensors[tensor.info.name] = entry | ({"sources": others} if others else {})
    infos = [tensor.info for tensor in pairing.outputs]
    return {
        "format": MANIFEST_FORMAT,
        "command": command(config),
        "method": config.method,
        **_settings(config),
        "models": [_parent(config, number, one, pairing, records) for number, one in enumerate(directories)],
        "num_merged": sum(tensor.is_merged for tensor in pairing.outputs),
        "num_copied": sum(not tensor.is_merged for tensor in pairing.outputs),
        "digest_algorithm": ALGORITHM,
        "digest": model_digest(infos, {name: record["digest"] for name, record in records.items()}),
        "rules": rules,
        "tensors": tensors,
        "unused": [{"model": number, "tensor": name} for number, name in pairing.unused],
        "warnings": list(warnings),
    }


def command(config: MergeConfig) -> str:
    """The command line of this merge, for a shell in the same working directory."""
    words = ["mindvl", "merge", *map(str, config.models), "--out", str(config.out)]
    default = replace(MergeConfig(models=config.models, out=config.out))
    for option, value in (("method", config.method), ("base", config.base), ("dtype", config.dtype)):
        if value is not None and value != getattr(default, option):
            words += [f"--{option}", str(value)]
    for option in ("scale", "density", "seed"):
        if getattr(config, option) != getattr(default, option):
            words += [f"--{option}", str(getattr(config, option))]
    if config.weights is not None:
        words += ["--weights", ",".join(map(repr, config.weights))]
    for pattern, weights in config.part_weights.items():
        words += ["--weights", f"{pattern}={','.join(map(repr, weights))}"]
    for option in ("only", "allow_missing", "allow_different"):
        for value in getattr(config, option):
            words += [f"--{option.replace('_', '-')}", value]
    words += ["--match-tokens"] * config.match_tokens + ["--any-weight-sum"] * config.any_weight_sum
    return shlex.join(words)


def _rule(config: MergeConfig, tensor: OutputTensor) -> dict[str, Any]:
    if not tensor.is_merged:
        return {"copied_from": 0}
    matched = any(source.rows is not None for source in tensor.sources)
    scaled = [source.parent for source in tensor.sources if source.scales is not None]
    missing = {
        str(source.parent): count
        for source in tensor.sources
        if source.rows is not None and (count := int((source.rows < 0).sum()))
    }
    return (
        {"method": config.method, "weights": list(tensor.weights)}
        | ({"rows_matched_by_token": True} if matched else {})
        | ({"num_missing_rows": missing} if missing else {})  # the other models provide these rows
        | ({"float8_models": scaled} if scaled else {})
    )


def _settings(config: MergeConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "only": list(config.only),
        "allow_missing": list(config.allow_missing),
        "allow_different": list(config.allow_different),
        "dtype": config.torch_dtype,
    }
    if config.method in WITH_BASE:
        settings["scale"] = config.scale
    if config.method in DROPPING:
        settings["density"] = config.density
    if config.method.startswith("dare"):
        settings["seed"] = config.seed
    return settings


def _parent(
    config: MergeConfig,
    number: int,
    directory: ModelDirectory,
    pairing: Pairing,
    records: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Path, weight, and the digest of what was read of a model; `complete` if that is every tensor."""
    digests: dict[str, str] = {}
    for tensor in pairing.outputs:
        read = records[tensor.info.name]["sources"]
        for source, digest in zip(tensor.sources, read, strict=True):
            if source.parent == number and digest is not None:
                digests[source.name] = digest
                if source.scales is not None:
                    digests[source.scales] = stored_digest(directory, source.scales)
    infos: list[TensorInfo] = [directory.tensors[name] for name in digests]
    is_base = number == len(config.models)
    return {
        "path": str(config.parents[number]),
        **({"role": "base"} if is_base else {"weight": config.model_weights[number]}),
        "digest": model_digest(infos, digests),
        "complete": len(digests) == len(directory.tensors),
    }
