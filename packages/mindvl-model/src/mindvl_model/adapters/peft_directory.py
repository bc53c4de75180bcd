# SPDX-License-Identifier: Apache-2.0
"""Read and write adapters as a PEFT directory: adapter_config.json and adapter_model.safetensors.

Comes after training (export) and before it (initial adapters). The format is that of PEFT 0.21 with transformers 5, whose
experts are two matrices per layer, gate_up_proj and down_proj: gate_proj and up_proj, which have matrices of their own
here, are written as one adapter of twice the rank, block by block.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mindvl_model.adapters.lora_config import LoRAConfig
from mindvl_model.adapters.targets import Target, find_targets, published_layers
from mindvl_model.config import MindVLConfig
from mindvl_model.errors import WeightError
from mindvl_model.parameters import Part
from mindvl_model.weights.directory import as_dtype, sync_directory
from mindvl_model.weights.json_file import read_json
from mindvl_model.weights.names import canonical_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_EXPERTS_PATTERN = r"mlp\.experts\.gate_up_proj"
_NOT_LINEAR = ("model.visual.patch_embed.proj", "model.language_model.embed_tokens", "lm_head")
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
    "layers_to_transform",
    "exclude_modules",
)
Read = Callable[[str], Tensor]  # whole matrix of the model by global name, such as LAYER.lora.q_proj.A


def published_factors(target: Target, index: int, read: Read) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of a published layer, or [E, rank, in] and [E, out, rank] of all experts."""
    a, b = (read(f"{target.layer}.lora.{target.key(index)}.{name}") for name in "AB")
    if target.experts:
        return a.transpose(1, 2), b.transpose(1, 2)
    return a, (target.rule.split(b)[0] if len(target.published) == 1 else b)  # queries, keys, values of vision by head


def write_peft_directory(
    out: Path,
    config: MindVLConfig,
    lora: LoRAConfig,
    parts: Iterable[Part],
    read: Read,
    *,
    base: Path | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the adapters of a model as a directory that PEFT loads; `out` is renamed into place once it is complete.

    Args:
        out: Directory to create.
        config: Configuration of the whole model.
        lora: Configuration of the adapters.
        parts: Parts that have adapters.
        read: Returns a whole matrix by global name; called once for each.
        base: Model directory that the adapters belong to; None: unknown.
        dtype: Data type of the written matrices; None: as read.

    Raises:
        WeightError: `out` exists or cannot be written.
    """
    if out.exists():
        raise WeightError(f"{out}: already exists. Choose a new directory, or remove it first.")
    targets = find_targets(config, lora, parts)
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tensors = {name: as_dtype(tensor, dtype).cpu() for name, tensor in _peft_tensors(targets, read)}
        save_file(tensors, unfinished / WEIGHTS, {"format": "pt"})
        document = _adapter_config(config, lora, targets, base)
        (unfinished / CONFIG).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
        sync_directory(unfinished)
        os.replace(unfinished, out)
    except OSError as error:
        what = error.strerror or str(error)[:300]
        raise WeightError(
            f"{out}: cannot be written ({what}). Free disk space, or choose another directory."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _peft_tensors(targets: dict[str, Target], read: Read) -> Iterator[tuple[str, Tensor]]:
    for target in targets.values():
        if target.experts:
            yield from _expert_tensors(target, targets, read)
            continue
        for index in target.chosen:
            for name, tensor in zip("AB", published_factors(target, index, read), strict=True):
                yield f"{PREFIX}{target.published[index]}.lora_{name}.weight", tensor.contiguous()


def _expert_tensors(target: Target, targets: dict[str, Target], read: Read) -> Iterator[tuple[str, Tensor]]:
    """The matrices of all experts, stacked as PEFT does for a parameter: A [E * rank, in], B [out, rank * E]."""
    factors = {index: published_factors(target, index, read) for index in target.chosen}
    a = torch.cat([one[0] for one in factors.values()], dim=1)  # [E, count * rank, in]
    some = next(iter(factors.values()))[1]
    blocks = []
    for index in range(target.per_expert):
        row = [factors[at][1] if at == index else torch.zeros_like(some) for at in target.chosen]
        blocks.append(torch.cat(row, dim=2))
    b = torch.cat(blocks, dim=1)  # [E, out, count * rank]
    both = target.per_expert == 2 and target.layer.replace("linear_fc1", "linear_fc2") in targets
    prefix = f"{PREFIX}{_experts_module(target)}." + ("base_layer." if both else "")  # PEFT nests the wrappers
    yield f"{prefix}lora_A.weight", a.reshape(-1, a.shape[2]).contiguous()
    yield f"{prefix}lora_B.weight", b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()


def _experts_module(target: Target) -> str:
    return target.published[0].rsplit(".", 2)[0]


def _adapter_config(
    config: MindVLConfig, lora: LoRAConfig, targets: dict[str, Target], base: Path | None
) -> dict[str, Any]:
    own = {target.published[index] for target in targets.values() if not target.experts for index in target.chosen}
    experts = [target for target in targets.values() if target.experts]
    parameters = {f"mlp.experts.{'down_proj' if one.per_expert == 1 else 'gate_up_proj'}" for one in experts}
    double = [one for one in experts if len(one.chosen) == 2]
    # PEFT divides by the rank of the pattern, so alpha grows with it.
    alpha = lora.alpha * (math.sqrt(2) if lora.rslora else 2)
    pattern = _EXPERTS_PATTERN
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": _plain(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": _suffixes(own, {*published_layers(config), *_NOT_LINEAR}) if own else None,
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": {pattern: 2 * lora.rank} if double else {},
        "alpha_pattern": {pattern: _plain(alpha)} if double else {},
    }


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _suffixes(own: set[str], known: set[str]) -> list[str]:
    """The shortest suffixes by which PEFT finds these layers and no other."""
    known = {name for name in known if ".experts." not in name}  # not modules in transformers 5
    found: set[str] = set()
    for name in sorted(own):
        components = name.split(".")
        # A number alone is also the last component of layers and blocks.
        for count in range(2 if components[-1].isdigit() else 1, len(components) + 1):
            suffix = ".".join(components[-count:])
            if suffix in found or {one for one in known if one == suffix or one.endswith(f".{suffix}")} <= own:
                found.add(suffix)
                break
    return sorted(found)


class PeftDirectory:
    """The adapters of a PEFT directory, by published layer. Headers are read at construction, matrices on request.

    Raises:
        WeightError: A file is missing or damaged, or the adapters are of a kind that mindvl does not train.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        document = read_json(path / CONFIG)
        if not isinstance(document, dict) or document.get("peft_type") != "LORA":
            raise WeightError(f"{path / CONFIG}: describes no LoRA adapter. Use a directory that PEFT saved with LoRA.")
        unsupported = [name for name in _UNSUPPORTED if document.get(name)]
        if document.get("bias", "none") != "none":
            unsupported.append("bias")
        patterns = {*(document.get("rank_pattern") or {}), *(document.get("alpha_pattern") or {})}
        if patterns - {_EXPERTS_PATTERN}:  # other ranks or scalings of some layers
            unsupported.append("rank_pattern" if document.get("rank_pattern") else "alpha_pattern")
        if unsupported:
            raise WeightError(
                f"{path / CONFIG}: {unsupported[0]}={document[unsupported[0]]} is not supported. Use an adapter without it, "
                "or merge it into its base model with PEFT."
            )
        self.config: dict[str, Any] = document
        try:
            self._file = safe_open(path / WEIGHTS, framework="pt")
            keys = list(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{path / WEIGHTS}: cannot be read ({error}). Copy the directory again.") from error
        self._keys = {self._module(key): key for key in keys}  # "MODULE.A" -> key

    def _module(self, key: str) -> str:
        module, _, matrix = key.removesuffix(".weight").rpartition(".lora_")
        if not key.startswith(PREFIX) or matrix not in ("A", "B"):
            raise WeightError(
                f"{self.path / WEIGHTS}: tensor {key!r:.200} is no matrix of LoRA. Use an adapter of LoRA only."
            )
        return f"{canonical_name(module.removeprefix(PREFIX))}.{matrix}"

    def as_config(self, config: MindVLConfig) -> LoRAConfig:
        """The configuration of the adapters of this directory, with every layer by its whole name and without dropout.

        Raises:
            WeightError: A layer does not exist in the model.
        """
        known = published_layers(config)
        targets: list[str] = []
        for name in sorted({name.rpartition(".")[0] for name in self._keys}):
            experts = name.removesuffix(".base_layer")
            if not experts.endswith(".experts"):
                targets.append(name)
                continue
            nested = f"{experts}.base_layer.A" in self._keys
            joined = name != experts or (not nested and "down_proj" not in str(self.config.get("target_parameters")))
            kinds = (".gate_proj", ".up_proj") if joined else (".down_proj",)
            targets += [one for one in known if one.startswith(f"{experts}.") and one.endswith(kinds)]
        unknown = sorted(set(targets) - set(known))
        if unknown or not targets:
            raise WeightError(
                f"{self.path}: has an adapter for {', '.join(unknown[:3])}, which the model does not have. Use its base model."
            )
        return LoRAConfig(
            rank=int(self.config["r"]),
            alpha=float(self.config["lora_alpha"]),
            rslora=bool(self.config.get("use_rslora")),
            targets=tuple(targets),
        )

    def check(self, config: MindVLConfig, lora: LoRAConfig, parts: Iterable[Part]) -> None:
        """Check that the directory has the adapters of a configuration, and no others.

        Raises:
            WeightError: Rank, scaling or layers differ.
        """
        stored = {"rank": self.config.get("r"), "alpha": self.config.get("lora_alpha")}
        stored["rslora"] = bool(self.config.get("use_rslora"))
        for name, value in stored.items():
            if getattr(lora, name) != value:
                raise WeightError(
                    f"{self.path / CONFIG}: adapters have {name} {value}, but the recipe has {getattr(lora, name)}. "
                    f"Set adapter.{name}={value}."
                )
        targets = find_targets(config, lora, parts)
        wanted = {name for one in targets.values() for name in self._modules_of(one)}
        found = {name.rpartition(".")[0] for name in self._keys}
        for differing, what, remedy in (
            (wanted - found, "has no adapter for", "Remove them from adapter.targets, or use another directory"),
            (found - wanted, "has adapters for layers that are not targets:", "Add them to adapter.targets"),
        ):
            if differing:
                raise WeightError(
                    f"{self.path}: {what} {', '.join(sorted(differing)[:3])} ({len(differing)} layers). {remedy}."
                )

    def _modules_of(self, target: Target) -> Iterator[str]:
        """Modules of the directory with the adapters of one layer of the model."""
        module = _experts_module(target)
        if target.experts and f"{module}.A" in self._keys:
            nested = f"{module}.base_layer"
            yield nested if target.per_expert == 2 and f"{nested}.A" in self._keys else module
            return
        for index in target.chosen:
            yield from target.published_of(index)

    def read(self, target: Target, index: int, expert: int | None = None) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of a published layer, of one expert if the layer has experts.

        Raises:
            WeightError: A matrix is damaged.
        """
        (module, *_) = list(self._modules_of(target))
        if expert is None:
            return self._matrix(target.published[index], "A"), self._matrix(target.published[index], "B")
        if ".experts." in module.removesuffix(".base_layer"):
            name = list(target.published_of(index))[expert]
            return self._matrix(name, "A"), self._matrix(name, "B")
        return self._of_expert(target, index, expert, module)

    def _of_expert(self, target: Target, index: int, expert: int, module: str) -> tuple[Tensor, Tensor]:
        count = len(target.published) // target.per_expert
        a = self._matrix(module, "A").reshape(count, -1, self._matrix(module, "A").shape[1])[expert]  # [rank, in]
        b = self._matrix(module, "B")
        b = b.reshape(b.shape[0], -1, count)[:, :, expert]  # [out, rank]
        b = b.chunk(target.per_expert)[index]
        rank = int(self.config["r"])
        if len(a) == rank:
            return a, b
        position = target.chosen.index(index) * rank
        own = slice(position, position + rank)
        others = torch.cat((b[:, :position], b[:, position + rank :]), dim=1)
        if len(a) != rank * len(target.chosen) or others.any():
            raise WeightError(
                f"{self.path}: the adapter of {module} has rank {len(a)}, which gate_proj and up_proj share. Use an adapter "
                f"whose experts have rank {rank}."
            )
        return a[own], b[:, own]

    def _matrix(self, module: str, matrix: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(self._keys[f"{module}.{matrix}"])
        except (OSError, SafetensorError, RuntimeError) as error:
            raise WeightError(
                f"{self.path / WEIGHTS}: {module} cannot be read ({error}). Copy the file again."
            ) from error
        return tensor
