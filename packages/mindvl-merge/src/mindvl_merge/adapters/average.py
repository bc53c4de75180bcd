# SPDX-License-Identifier: Apache-2.0
"""Average the adapters of several PEFT directories exactly, by concatenating their matrices.

Comes after adapter_directory.py; run.py calls it if all models of a merge are adapters. The average of scaling_i B_i A_i is one
product: the rows of all A_i, and the columns of all B_i times weight and scaling. Its rank is the sum of the ranks. A layer
that only some of the models adapt is filled with zeros up to this rank, so that all layers have one rank.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..config import MergeConfig
from ..digests import ALGORITHM, block_ranges, model_digest, stored_digest, tensor_digest
from ..errors import MergeError
from ..files import other_files
from ..headers import TensorInfo
from ..manifest import MANIFEST_FORMAT, MANIFEST_NAME, command
from ..publish import partial_directory, replace_directory
from ..writer import header_bytes
from .checks import check_bases, check_layers, check_patterns, is_selected, result_dtype
from .peft_directory import (
    BASE_KEY,
    CONFIG_NAME,
    EXPERT_PARAMETERS,
    PREFIX,
    WEIGHTS_NAME,
    AdaptedLayer,
    AdapterDirectory,
)

_RESTRICTING = ("layers_to_transform", "layers_pattern", "exclude_modules")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json", MANIFEST_NAME, CONFIG_NAME, "README.md")
_IGNORED_DIRECTORIES = (".git", ".cache", "__pycache__")


def check_adapters(config: MergeConfig) -> "AdapterAverage":
    """Read configurations and headers of the adapters, and plan the result.

    Raises:
        MergeError: The adapters cannot be averaged.
    """
    return AdapterAverage(config, [AdapterDirectory(path) for path in config.models])


def merge_adapters(
    config: MergeConfig, recorded: MergeConfig, out: Path, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Write the average of adapters as a PEFT directory; returns the manifest, as `merge` does."""
    average = check_adapters(config)
    try:
        with partial_directory(out) as partial:
            digests = average.write(partial / WEIGHTS_NAME, progress)
            document = average.manifest(recorded, digests)
            for name, content in ((CONFIG_NAME, average.peft_config()), (MANIFEST_NAME, document)):
                (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            first = average.directories[0].path
            for file in other_files(
                first, lambda one: one.name in _IGNORED_DIRECTORIES or one.name.endswith(_NOT_COPIED)
            ):
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(first / file, partial / file)
            replace_directory(partial, out)
    finally:
        average.close()
    return document


class AdapterAverage:
    """The average of the adapters of several directories: what is written, and its values."""

    def __init__(self, config: MergeConfig, directories: Sequence[AdapterDirectory]) -> None:
        self.directories = directories
        self._config = config
        self.rank = sum(one.rank for one in directories)
        self._dtype = result_dtype(config, directories)
        self._layers: dict[str, dict[int, AdaptedLayer]] = {}  # by name, then by number of the directory
        for number, directory in enumerate(directories):
            for name, layer in directory.layers.items():
                self._layers.setdefault(name, {})[number] = layer
        check_bases(config, directories)
        check_layers(self._layers, directories)
        check_patterns(config, list(self._layers))
        factors = [abs(self._factor(name, number)) for name, layers in self._layers.items() for number in layers]
        # With weights and scalings that are all alike the columns of B are copied, and not rounded again.
        self._scaling = next((one for one in factors if one), 1.0)
        self.infos = self._make_infos()

    @property
    def written_bytes(self) -> int:
        """Size of the values of the result."""
        return sum(info.num_bytes for info in self.infos.values())

    @property
    def read_bytes(self) -> int:
        """Size of the values of all adapters."""
        return sum(info.num_bytes for one in self.directories for info in one.weights.tensors.values())

    def close(self) -> None:
        """Close the files of the adapters."""
        for directory in self.directories:
            directory.weights.close()

    def write(self, path: Path, progress: Callable[[int, int], None]) -> dict[str, str]:
        """Write the weights; returns the digest of each tensor."""
        digests, done = {}, 0
        with open(path, "wb") as file:
            file.write(header_bytes(self.infos.values()))
            for name in self._layers:
                for info, values in zip(self._infos_of(name), self._matrices(name), strict=True):
                    with np.errstate(over="ignore"):
                        rounded = values.astype(info.dtype)
                    if not np.isfinite(rounded.astype(np.float64)).all():
                        raise MergeError(
                            f"{info.name}: the average exceeds the range of {info.dtype}. Use --dtype fp32."
                        )
                    file.write(rounded.tobytes())
                    flat = rounded.reshape(-1)
                    blocks = block_ranges(info.shape)
                    digests[info.name] = tensor_digest(
                        xxhash.xxh3_128_digest(flat[start:stop].tobytes()) for start, stop in blocks
                    )
                    done += info.num_bytes
                    progress(done, self.written_bytes)
        return digests

    def peft_config(self) -> dict[str, Any]:
        """The content of adapter_config.json: that of the first model, with the layers and ranks of the average."""
        configs = [one.config for one in self.directories]
        dropouts = {one.get("lora_dropout") or 0.0 for one in configs}
        document = {key: value for key, value in configs[0].items() if key not in _RESTRICTING}
        parameters = {one for config in configs for one in config.get("target_parameters") or ()}
        ranks = {self._pattern(name): rank for name in self._layers if (rank := self._rank(name)) != self.rank}
        return document | {
            BASE_KEY: next((one[BASE_KEY] for one in configs if one.get(BASE_KEY)), None),
            "r": self.rank,
            "lora_alpha": self._alpha(self.rank),
            "use_rslora": False,
            "lora_dropout": dropouts.pop() if len(dropouts) == 1 else 0.0,
            "init_lora_weights": True,
            "inference_mode": True,
            "target_modules": self._target_modules(),
            "target_parameters": sorted(parameters) or None,
            "rank_pattern": ranks,
            "alpha_pattern": {pattern: self._alpha(rank) for pattern, rank in ranks.items()},
        }

    def manifest(self, recorded: MergeConfig, digests: dict[str, str]) -> dict[str, Any]:
        """The content of `merge.json`, as for whole models."""
        rules: list[dict[str, Any]] = []
        tensors = {}
        for name, layers in self._layers.items():
            rule = {"method": "average", "weights": list(self._weights(name)), "adapted_in": sorted(layers)}
            if rule not in rules:
                rules.append(rule)
            for info in self._infos_of(name):
                tensors[info.name] = {"rule": rules.index(rule), "digest": digests[info.name]}
        models = []
        for path, weight, directory in zip(recorded.models, recorded.model_weights, self.directories, strict=True):
            stored = {name: stored_digest(directory.weights, name) for name in directory.weights.tensors}
            digest = model_digest(directory.weights.tensors.values(), stored)
            one = {"path": str(path), "weight": weight, "digest": digest, "complete": True}
            models.append(one | {"rank": directory.rank, "alpha": directory.config["lora_alpha"]})
        return {
            "format": MANIFEST_FORMAT,
            "command": command(recorded),
            "method": recorded.method,
            "adapter_rank": self.rank,
            "dtype": recorded.torch_dtype,
            "allow_different": list(recorded.allow_different),
            "models": models,
            "num_merged": len(tensors),
            "num_copied": 0,
            "digest_algorithm": ALGORITHM,
            "digest": model_digest(self.infos.values(), digests),
            "rules": rules,
            "tensors": tensors,
            "unused": [],
            "warnings": [],
        }

    def _matrices(self, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """A [E * rank, in] and B [out, rank * E] of the average of one layer."""
        layers, rank = self._layers[name], self._rank(name)
        num_experts, num_out, num_in = next(iter(layers.values())).size
        a, b = np.zeros((num_experts, rank, num_in)), np.zeros((num_out, rank, num_experts))
        num_halves = 2 if self._is_joined(name) else 1
        positions = [half * rank // num_halves for half in range(num_halves)]
        for number, layer in layers.items():
            own_a, own_b = self.directories[number].factors(name)
            width = layer.rank // num_halves
            for half in range(num_halves):
                to = slice(positions[half], positions[half] + width)
                source = slice(half * width, (half + 1) * width)
                a[:, to] = own_a[:, source]
                b[:, to] = own_b[:, source] * (self._factor(name, number) / self._scaling)
                positions[half] += width
        return a.reshape(-1, num_in), b.reshape(num_out, -1)

    def _rank(self, name: str) -> int:
        total = sum(layer.rank for layer in self._layers[name].values())
        return 2 * self.rank if self._is_joined(name) else max(self.rank, total)

    def _is_joined(self, name: str) -> bool:
        """Whether the adapters of gate_proj and up_proj are the halves of one of twice the rank, as mindvl exports them.

        The halves stay halves, so that mindvl can read the average as adapters of two layers.
        """
        layers = self._layers[name].items()
        return name.endswith(f".experts.{EXPERT_PARAMETERS[0]}") and all(
            layer.rank == 2 * self.directories[number].rank for number, layer in layers
        )

    def _alpha(self, rank: int) -> float:
        alpha = self._scaling * rank
        return int(alpha) if alpha == int(alpha) else alpha

    def _factor(self, name: str, number: int) -> float:
        """What the product of the matrices of one model is multiplied by."""
        return self._weights(name)[number] * self._layers[name][number].scaling

    def _weights(self, name: str) -> Sequence[float]:
        for pattern, weights in self._config.part_weights.items():
            if is_selected(name, pattern):
                return weights
        return self._config.model_weights

    def _pattern(self, name: str) -> str:
        """A regular expression for a layer of another rank; one for all layers if these parameters have the same rank."""
        suffix = ".".join(name.split(".")[-3:])
        alike = {self._rank(other) for other in self._layers if other.endswith(f".{suffix}")}
        is_parameter = next(iter(self._layers[name].values())).is_parameter
        return re.escape(suffix if is_parameter and len(alike) == 1 else name)

    def _target_modules(self) -> list[str] | None:
        configs = [one.config for one in self.directories]
        linear = [name for name, layers in self._layers.items() if not next(iter(layers.values())).is_parameter]
        are_suffixes = all(
            (
                isinstance(one.get("target_modules"), list)
                or (not one.get("target_modules") and one.get("target_parameters"))
            )
            and not any(one.get(key) for key in _RESTRICTING)
            for one in configs
        )
        if are_suffixes:
            linear = [suffix for one in configs for suffix in one.get("target_modules") or ()]
        return sorted(set(linear)) or None

    def _make_infos(self) -> dict[str, TensorInfo]:
        infos, offset = {}, 0
        for name, layers in self._layers.items():
            num_experts, num_out, num_in = next(iter(layers.values())).size
            rows = self._rank(name) * num_experts
            module = self._module(name)
            for matrix, shape in (("A", (rows, num_in)), ("B", (num_out, rows))):
                info = TensorInfo(
                    name=f"{PREFIX}{module}.lora_{matrix}.weight",
                    shape=shape,
                    dtype=self._dtype,
                    file=WEIGHTS_NAME,
                    offset=offset,
                )
                infos[info.name] = info
                offset += info.num_bytes
        return infos

    def _module(self, name: str) -> str:
        """The module of the file that adapts a layer; PEFT nests the adapters of two parameters of the same experts."""
        if not next(iter(self._layers[name].values())).is_parameter:
            return name
        experts, _, parameter = name.rpartition(".")
        is_inner = parameter == EXPERT_PARAMETERS[0] and f"{experts}.{EXPERT_PARAMETERS[1]}" in self._layers
        return f"{experts}.base_layer" if is_inner else experts

    def _infos_of(self, name: str) -> list[TensorInfo]:
        return [self.infos[f"{PREFIX}{self._module(name)}.lora_{matrix}.weight"] for matrix in "AB"]
