# SPDX-License-Identifier: Apache-2.0
"""PEFT directories with LoRA adapters: adapter_config.json and adapter_model.safetensors.

Comes after mindvl_merge/directory.py, which reads the tensors; average.py averages several of them. Format: PEFT 0.21
(github.com/huggingface/peft). Experts of transformers 5 are parameters of three dimensions, gate_up_proj and down_proj; their
A is [E * rank, in] with the experts one after another, and their B [out, rank * E] with the experts side by side in each rank.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..directory import INDEX_NAME, SINGLE_NAME, ModelDirectory
from ..errors import DirectoryError
from ..files import read_json, regular_file
from ..headers import TensorInfo

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
BASE_KEY = "base_model_name_or_path"
PREFIX = "base_model.model."
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")  # in the order of the model: PEFT wraps the first one first
FOLD_HINT = (
    "Fold each adapter into its base model (mindvl convert BASE OUT --merge-adapter ADAPTER), and merge the results."
)

_NESTED = ".base_layer"
_EXPERTS = ".experts"
_SUPPORTED = {  # keys whose values are used here, or do not change the product of the matrices
    *("peft_type", "task_type", "auto_mapping", "peft_version", BASE_KEY, "revision", "inference_mode"),
    *(
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "lora_dropout",
        "init_lora_weights",
        "eva_config",
    ),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "bias", "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
}
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")  # others also change the base model


def is_adapter_directory(path: Path) -> bool:
    """Whether a directory has adapters and no whole model."""
    has_model = (path / SINGLE_NAME).exists() or (path / INDEX_NAME).exists()
    return (path / CONFIG_NAME).exists() and not has_model


def model_directory_problem(path: Path) -> str | None:
    """Why a directory cannot be loaded as a whole model, with what to do; None if it has a config.json."""
    if (path / "config.json").is_file():
        return None
    if is_adapter_directory(path):
        return (
            f"{path}: is a LoRA adapter without its base model. Fold it into its base model (mindvl convert BASE OUT "
            f"--merge-adapter {path}), and give the result."
        )
    return f"{path}: is not a model directory, it has no config.json. Give an exported model."


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """The adapter of one linear layer, or of one parameter of all experts of a layer."""

    name: str  # in the base model
    a: TensorInfo  # [E * rank, in]
    b: TensorInfo  # [out, rank * E]
    rank: int
    scaling: float  # the product of the matrices is multiplied by it
    is_parameter: bool

    @property
    def num_experts(self) -> int:
        """E; 1 for a linear layer."""
        return self.a.shape[0] // self.rank

    @property
    def size(self) -> tuple[int, int, int]:
        """E, out and in, which must agree between adapters of one base model."""
        return self.num_experts, self.b.shape[0], self.a.shape[1]


class AdapterDirectory:
    """The adapters of a PEFT directory by layer; only headers are read until matrices are requested.

    Raises:
        DirectoryError: A file is missing or damaged, or the adapters are more than two matrices per layer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(regular_file(path, CONFIG_NAME))
        _check_config(path / CONFIG_NAME, self.config)
        self.rank: int = self.config["r"]
        if not (path / WEIGHTS_NAME).exists() and (path / "adapter_model.bin").exists():
            raise DirectoryError(
                f"{path / 'adapter_model.bin'}: pickled weights are not read. Save the adapter with PEFT as safetensors."
            )
        self.weights = ModelDirectory(path, WEIGHTS_NAME)
        self.layers = {layer.name: layer for layer in self._read_layers()}

    def factors(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """A [E, rank, in] and B [out, rank, E] of a layer.

        Raises:
            DirectoryError: A value is not finite, or the file cannot be read.
        """
        layer = self.layers[name]
        a, b = (self._values(info) for info in (layer.a, layer.b))
        return a.reshape(layer.num_experts, layer.rank, -1), b.reshape(len(b), layer.rank, layer.num_experts)

    def _values(self, info: TensorInfo) -> npt.NDArray[np.float64]:
        values = self.weights.read(info.name, 0, info.num_values).astype(np.float64)
        if not np.isfinite(values).all():
            raise DirectoryError(
                f"{self.path / WEIGHTS_NAME}: tensor {info.name} has values that are not finite. Use another checkpoint."
            )
        return values.reshape(info.shape)

    def _read_layers(self) -> list[AdaptedLayer]:
        where, pairs = self.path / WEIGHTS_NAME, dict[str, dict[str, TensorInfo]]()
        for info in self.weights.tensors.values():
            match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", info.name)
            if match is None or len(info.shape) != 2 or not info.is_float or 0 in info.shape:
                raise DirectoryError(
                    f"{where}: tensor {info.name:.200} with shape {list(info.shape)} is not a matrix of a linear layer. Fold "
                    "each adapter into its base model with PEFT (merge_and_unload), and merge the results."
                )
            pairs.setdefault(match[1], {})[match[2]] = info
        if not pairs:
            raise DirectoryError(f"{where}: has no adapters. Copy the directory again.")
        return [self._layer(module, pair, pairs.keys()) for module, pair in pairs.items()]

    def _layer(self, module: str, pair: dict[str, TensorInfo], modules: Any) -> AdaptedLayer:
        where = self.path / WEIGHTS_NAME
        parameter = self._parameter(module, modules)
        name = module if parameter is None else f"{module.removesuffix(_NESTED)}.{parameter}"
        rank = self._of_pattern("rank_pattern", name, self.rank)
        alpha = self._of_pattern("alpha_pattern", name, self.config["lora_alpha"])
        if pair.keys() != {"A", "B"}:
            raise DirectoryError(f"{where}: {module:.200} has only one of two matrices. Copy the directory again.")
        (rows, _), (_, columns) = pair["A"].shape, pair["B"].shape
        if type(rank) is not int or rank < 1 or rows != columns or rows % rank or (parameter is None and rows != rank):
            raise DirectoryError(
                f"{where}: the matrices of {module:.200} have {rows} rows and {columns} columns, but {CONFIG_NAME} has rank "
                f"{rank!r:.40}. Copy the directory again."
            )
        scaling = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return AdaptedLayer(
            name=name, a=pair["A"], b=pair["B"], rank=rank, scaling=scaling, is_parameter=parameter is not None
        )

    def _parameter(self, module: str, modules: Any) -> str | None:
        """The parameter of experts that a module of the file adapts; None for a linear layer.

        PEFT wraps the wrapper of the first parameter for the second one, so that the first is below `base_layer`.
        """
        experts = module.removesuffix(_NESTED)
        if not experts.endswith(_EXPERTS):
            return None
        chosen = [
            parameter
            for parameter in EXPERT_PARAMETERS
            if any(f".{experts}.{parameter}".endswith(f".{one}") for one in self.config.get("target_parameters") or ())
        ]
        is_nested = f"{experts}{_NESTED}" in modules
        if len(chosen) != 1 + is_nested or (is_nested and experts not in modules):
            raise DirectoryError(
                f"{self.path / CONFIG_NAME}: target_parameters does not name the parameters of {experts:.200}. Save the adapter "
                "again with the PEFT version that trained it."
            )
        return chosen[0] if module != experts else chosen[-1]

    def _of_pattern(self, key: str, name: str, default: Any) -> Any:
        """The value of the first pattern that matches the end of a name, as PEFT finds it."""
        for pattern, value in (self.config.get(key) or {}).items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", name):
                    return value
            except re.error as error:
                raise DirectoryError(
                    f"{self.path / CONFIG_NAME}: {key}: {pattern!r:.100} is not a regular expression ({error}). Correct it."
                ) from error
        return default


def _check_config(where: Path, document: dict[str, Any]) -> None:
    if document.get("peft_type") != "LORA":
        raise DirectoryError(
            f"{where}: peft_type is {document.get('peft_type')!r:.40}, only LORA can be averaged. Fold each adapter into its "
            "base model with PEFT (merge_and_unload), and merge the results."
        )
    unsupported = [key for key, value in document.items() if value and key not in _SUPPORTED]
    unsupported += ["bias"] * (document.get("bias", "none") != "none")
    unsupported += ["init_lora_weights"] * (document.get("init_lora_weights") not in _INITIALIZATIONS)
    parameters = document.get("target_parameters") or ()
    if any(not str(one).endswith(EXPERT_PARAMETERS) for one in parameters):
        unsupported.append("target_parameters")
    if unsupported:
        key = unsupported[0]
        hint = "Fold each adapter into its base model with PEFT (merge_and_unload), and merge the results."
        raise DirectoryError(
            f"{where}: {key}={document[key]!r:.100} is not supported in an average of adapters. "
            f"{FOLD_HINT if key == 'use_dora' else hint}"
        )
    for key in ("r", "lora_alpha"):
        _check_number(where, key, document.get(key), is_integer=key == "r")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = document.get(key) or {}
        if not isinstance(patterns, dict):
            raise DirectoryError(f"{where}: {key} must be an object, got {patterns!r:.60}. Copy the directory again.")
        for pattern, value in patterns.items():
            _check_number(where, f"{key}.{pattern:.100}", value, is_integer=key == "rank_pattern")


def _check_number(where: Path, key: str, value: Any, *, is_integer: bool) -> None:
    is_number = type(value) is int or (not is_integer and type(value) is float and math.isfinite(value))
    if not is_number or (is_integer and value < 1):
        kind = "an integer >= 1" if is_integer else "a finite number"
        raise DirectoryError(f"{where}: {key} must be {kind}, got {value!r:.40}. Copy the directory again.")
