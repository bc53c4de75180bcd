# SPDX-License-Identifier: Apache-2.0
"""Read the adapters of a PEFT directory: adapter_config.json and adapter_model.safetensors.

Comes before training (initial adapters) and before fold.py; peft_export.py writes such directories. The format is that of
PEFT 0.21 with transformers 5, whose experts are two matrices per layer, gate_up_proj and down_proj. An adapter of
gate_up_proj is read as one of gate_proj and one of up_proj: with the same A, or with half of its rank each if its B has two
blocks, as in exports of mindvl.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindvl_model.adapters.lora_config import LoRAConfig
from mindvl_model.adapters.sizes import published_size
from mindvl_model.adapters.targets import Target, find_targets, published_layers
from mindvl_model.config import MindVLConfig
from mindvl_model.errors import WeightError
from mindvl_model.parameters import Part
from mindvl_model.weights.json_file import read_json
from mindvl_model.weights.names import canonical_name, published_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NORMS = "lora_magnitude_vector"  # of DoRA, in the names of tensors
_PLAIN_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")  # the others also change the base model
_KNOWN = {  # keys that are used here, or do not change the product of the matrices
    *(
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("init_lora_weights", "loftq_config", "eva_config", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
    *("ensure_weight_tying", "runtime_config"),
}
_WITH_PEFT = "merge it into its base model with PEFT (merge_and_unload) and use the result"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one published layer: W + scaling * B A, with rows of the given norms if there are some."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scaling: float
    norms: Tensor | None  # [out], of DoRA

    def with_scaling(self, scaling: float) -> Tensor:
        """B for another scaling, so that the product is the same."""
        return self.b if math.isclose(scaling, self.scaling) else self.b * (self.scaling / scaling)

    def folded(self, weight: Tensor) -> Tensor:
        """The weight [out, in] that gives the same outputs without an adapter, in fp32."""
        folded = weight.float() + self.scaling * (self.b.float() @ self.a.float())
        if self.norms is not None:
            folded *= (self.norms.float() / torch.linalg.vector_norm(folded, dim=1))[:, None]
        return folded


class PeftDirectory:
    """The adapters of a PEFT directory, by published layer. Headers are read at construction, matrices on request.

    Raises:
        WeightError: A file is missing or damaged, or the adapters are of a kind that mindvl does not train.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_config(path / CONFIG)
        if not (path / WEIGHTS).is_file():
            others = sorted(one.name for one in path.glob("adapter_model*"))
            raise WeightError(
                f"{path / WEIGHTS}: does not exist{f', but {others[0]}' if others else ''}. Load the adapter with PEFT, and save "
                "it in one safetensors file (save_pretrained)."
            )
        try:
            self._file = safe_open(path / WEIGHTS, framework="pt")
            keys = list(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{path / WEIGHTS}: cannot be read ({error}). Copy the directory again.") from error
        self._keys = {self._module(key): key for key in keys}  # "MODULE.A" -> key
        self._shapes = {module: tuple(self._file.get_slice(key).get_shape()) for module, key in self._keys.items()}
        matrices = ("A", "B", "M") if self.config.get("use_dora") else ("A", "B")
        for module in sorted(self._modules()):
            shapes = [self._shapes.get(f"{module}.{matrix}") for matrix in matrices]
            if None in shapes:
                raise WeightError(
                    f"{path / WEIGHTS}: the adapter of {module:.200} is not complete. Copy the directory again."
                )
            if any(shape is None or len(shape) != 2 for shape in shapes[:2]):
                raise WeightError(
                    f"{path / WEIGHTS}: has an adapter for {module:.200}, which is no linear layer. Use an adapter without "
                    f"it, or {_WITH_PEFT}."
                )
        self._of_all = lru_cache(maxsize=2)(self._matrix)  # A and B of the same experts

    def _module(self, key: str) -> str:
        module, _, matrix = key.removesuffix(".weight").rpartition(".lora_")
        matrix = {"A": "A", "B": "B", "magnitude_vector": "M"}.get(matrix, "")
        if not key.startswith(PREFIX) or not matrix:
            raise WeightError(
                f"{self.path / WEIGHTS}: tensor {key!r:.200} is no matrix of a linear layer. Use an adapter of linear layers, or "
                f"{_WITH_PEFT}."
            )
        return f"{canonical_name(module.removeprefix(PREFIX))}.{matrix}"

    def _modules(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self._keys}

    def as_config(self, config: MindVLConfig) -> LoRAConfig:
        """The configuration of the adapters of this directory, with every layer by its whole name and without dropout.

        Raises:
            WeightError: A layer does not exist in the model, or is no layer that mindvl adapts.
        """
        known = published_layers(config)
        targets: list[str] = []
        for name in sorted(self._modules()):
            experts = name.removesuffix(".base_layer")
            if not experts.endswith(".experts"):
                targets.append(name)
                continue
            kinds = (".down_proj",) if self._parameter(name).endswith(".down_proj") else (".gate_proj", ".up_proj")
            targets += [one for one in known if one.startswith(f"{experts}.") and one.endswith(kinds)]
        unknown = sorted(set(targets) - set(known))
        if unknown or not targets:
            raise WeightError(
                f"{self.path}: has an adapter for {', '.join(unknown[:3]) or 'no layer'}, which is no layer of the model that "
                f"mindvl adapts. Use its base model, or {_WITH_PEFT}."
            )
        return LoRAConfig(
            rank=self.config["r"],
            alpha=float(self.config["lora_alpha"]),
            rslora=bool(self.config.get("use_rslora")),
            dora=bool(self.config.get("use_dora")),
            targets=tuple(targets),
        )

    def check(self, config: MindVLConfig, lora: LoRAConfig, parts: Iterable[Part]) -> None:
        """Check that the directory has the adapters of a configuration, and no others.

        One rank and scaling of all layers must be those of the configuration. Otherwise its rank must be the largest of the
        layers, and B is multiplied so that the products stay the same.

        Raises:
            WeightError: Rank, scaling, layers or their sizes differ.
        """
        targets = find_targets(config, lora, parts)
        wanted = {name for one in targets.values() for name in self._modules_of(one)}
        found = self._modules()
        for differing, what, remedy in (
            (wanted - found, "has no adapter for", "Remove them from adapter.targets, or use another directory"),
            (found - wanted, "has adapters for layers that are not targets:", "Add them to adapter.targets"),
        ):
            if differing:
                raise WeightError(
                    f"{self.path}: {what} {', '.join(sorted(differing)[:3])} ({len(differing)} layers). {remedy}."
                )
        described = set()
        for target in targets.values():
            for index in target.chosen:
                module = next(self._modules_of(target, index))
                described.add((self._rank_of(target, module), self._scaling_of(module)))
                inputs, outputs = published_size(config, target, index)
                outputs *= target.per_expert if self._is_of_all(module) else 1
                stored = self._shapes[f"{module}.A"][1], self._shapes[f"{module}.B"][0]
                if stored != (inputs, outputs):
                    raise WeightError(
                        f"{self.path}: the adapter of {module} has {stored[0]} inputs and {stored[1]} outputs, but the layer has "
                        f"{inputs} and {outputs}. Use an adapter of this base model."
                    )
        values: dict[str, Any] = {"rank": max(rank for rank, _ in described)}
        if described == {(self.config["r"], self._scaling_of(""))}:  # one rank and scaling for all layers
            values |= {"alpha": self.config["lora_alpha"], "rslora": bool(self.config.get("use_rslora"))}
        values["dora"] = bool(self.config.get("use_dora"))
        for name, value in values.items():
            if getattr(lora, name) != value:
                raise WeightError(
                    f"{self.path / CONFIG}: adapters have {name} {value}, but the recipe has {getattr(lora, name)}. "
                    f"Set adapter.{name}={str(value).lower()}."
                )

    def read(self, target: Target, index: int, expert: int | None = None) -> Adapter:
        """The adapter of a published layer, of one expert if the layer has experts.

        Raises:
            WeightError: A matrix is damaged.
        """
        modules = list(self._modules_of(target, index))
        module = modules[expert if expert is not None and len(modules) > 1 else 0]
        if self._is_of_all(module):
            assert expert is not None
            a, b = self._of_expert(target, index, expert, module)
        else:
            a, b = self._matrix(f"{module}.A"), self._matrix(f"{module}.B")
        norms = self._matrix(f"{module}.M") if f"{module}.M" in self._keys else None
        return Adapter(a, b, self._scaling_of(module), norms)

    def _modules_of(self, target: Target, index: int | None = None) -> Iterator[str]:
        """Modules of the directory with the adapters of a layer of the model, or of one of its published layers."""
        experts = experts_module(target)
        if target.experts and f"{experts}.A" in self._keys:
            nested = f"{experts}.base_layer"
            yield nested if target.per_expert == 2 and f"{nested}.A" in self._keys else experts
            return
        for one in target.chosen if index is None else (index,):
            yield from target.published_of(one)

    def _is_of_all(self, module: str) -> bool:
        """Whether a module adapts one parameter of all experts."""
        return module.removesuffix(".base_layer").endswith(".experts")

    def _parameter(self, module: str) -> str:
        """The layer or parameter that a module adapts, as patterns name it; PEFT wraps gate_up_proj before down_proj."""
        if not self._is_of_all(module):
            return module
        experts = module.removesuffix(".base_layer")
        is_nested = f"{experts}.base_layer.A" in self._keys
        is_down = is_nested or "down_proj" in str(self.config.get("target_parameters"))
        return f"{experts}.{'down_proj' if module == experts and is_down else 'gate_up_proj'}"

    def _rank_of(self, target: Target, module: str) -> int:
        """The rank of each published layer that a module adapts."""
        rows = self._shapes[f"{module}.A"][0]
        if not self._is_of_all(module):
            return rows
        rank = rows // (len(target.published) // target.per_expert)
        return rank // 2 if self._has_blocks(target, rank) else rank

    def _has_blocks(self, target: Target, rank: int) -> bool:
        """Whether gate_proj and up_proj have half of the rank each, as in exports of mindvl; `_of_expert` checks it."""
        return target.per_expert == 2 and rank == 2 * int(self.config["r"])

    def _scaling_of(self, module: str) -> float:
        """The scaling of a module, or of all for which there is no pattern."""
        name = self._parameter(module)
        rank, alpha = self._of_pattern("rank_pattern", name, "r"), self._of_pattern("alpha_pattern", name, "lora_alpha")
        rows = self._shapes.get(f"{module}.A", (rank,))[0]
        if rows != rank and (rows % rank or not self._is_of_all(module)):
            raise WeightError(
                f"{self.path / CONFIG}: the rank of {module:.200} is {rank}, but its matrix A has {rows} rows. Copy the "
                "directory again."
            )
        scaling: float = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        return scaling

    def _of_pattern(self, key: str, name: str, default: str) -> Any:
        """The value of the first pattern that matches the end of a name, as PEFT finds it."""
        for pattern, value in (self.config.get(key) or {}).items():
            if any(re.match(rf"(.*\.)?({pattern})$", one) for one in (name, published_name(name))):
                return value
        return self.config[default]

    def _of_expert(self, target: Target, index: int, expert: int, module: str) -> tuple[Tensor, Tensor]:
        count = len(target.published) // target.per_expert
        a = self._of_all(f"{module}.A").unflatten(0, (count, -1))[expert]  # [rank, in]
        b = self._of_all(f"{module}.B").unflatten(1, (-1, count))[:, :, expert]  # [out, rank]
        parts = b.chunk(target.per_expert)
        if any(one.any() for at, one in enumerate(parts) if at not in target.chosen):
            raise WeightError(
                f"{self.path}: the adapter of {module} adapts gate_proj and up_proj, of which one is no target. Add both to "
                "adapter.targets."
            )
        b = parts[index]
        if not self._has_blocks(target, len(a)):
            return a, b
        rank = len(a) // 2
        own, other = slice(rank * index, rank * (index + 1)), slice(rank * (1 - index), rank * (2 - index))
        if b[:, other].any():
            raise WeightError(
                f"{self.path}: the adapter of {module} has rank {len(a)}, which gate_proj and up_proj share, but r is {rank}. "
                f"Set r in {CONFIG} to {len(a)}, and rank_pattern and alpha_pattern for the other layers."
            )
        return a[own], b[:, own]

    def _matrix(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(self._keys[name])
        except (OSError, SafetensorError, RuntimeError) as error:
            raise WeightError(
                f"{self.path / WEIGHTS}: {name} cannot be read ({error}). Copy the file again."
            ) from error
        return tensor


def experts_module(target: Target) -> str:
    """The module of all experts of a layer, whose parameters PEFT adapts."""
    return target.published[0].rsplit(".", 2)[0]


def _read_config(file: Path) -> dict[str, Any]:
    document = read_json(file)
    if not isinstance(document, dict) or document.get("peft_type") != "LORA":
        raise WeightError(f"{file}: describes no LoRA adapter. Use a directory that PEFT saved with LoRA.")
    unsupported = [name for name, value in document.items() if value and name not in _KNOWN]
    unsupported += ["bias"] * (document.get("bias", "none") != "none")
    if unsupported:
        raise WeightError(
            f"{file}: {unsupported[0]}={document[unsupported[0]]!r:.100} is not supported. Use an adapter without it, or "
            f"{_WITH_PEFT}."
        )
    start = document.get("init_lora_weights", True)
    if start not in _PLAIN_INITIALIZATIONS:
        raise WeightError(
            f"{file}: init_lora_weights={start!r:.100} changed the base model too. Save the adapter with PEFT as plain LoRA "
            f"(save_pretrained with path_initial_model_for_weight_conversion), or {_WITH_PEFT}."
        )
    numbers: dict[str, Any] = {"r": document.get("r"), "lora_alpha": document.get("lora_alpha")}
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern, value in (document.get(key) or {}).items():
            numbers[f"{key}.{pattern:.100}"] = value
            try:
                re.compile(pattern)
            except re.error as error:
                raise WeightError(
                    f"{file}: {key}: {pattern!r:.100} is not a regular expression ({error}). Correct it."
                ) from error
    for key, value in numbers.items():
        is_rank = key == "r" or key.startswith("rank")
        if type(value) not in ((int,) if is_rank else (int, float)) or not 0 < value < math.inf:
            kind = "an integer" if is_rank else "a finite number"
            raise WeightError(f"{file}: {key} must be {kind} > 0, got {value!r:.40}. Copy the directory again.")
    return document
