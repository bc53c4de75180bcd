# SPDX-License-Identifier: Apache-2.0
"""Write adapters as a PEFT directory: adapter_config.json and adapter_model.safetensors.

Comes after training; peft_directory.py reads such directories. The format is that of PEFT 0.21 with transformers 5, whose
experts are two matrices per layer, gate_up_proj and down_proj: gate_proj and up_proj, which have matrices of their own
here, are written as one adapter of twice the rank, block by block.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindvl_model.adapters.lora_config import LoRAConfig
from mindvl_model.adapters.peft_directory import CONFIG, NORMS, PREFIX, WEIGHTS, experts_module
from mindvl_model.adapters.targets import Target, find_targets, published_layers
from mindvl_model.config import MindVLConfig
from mindvl_model.errors import WeightError
from mindvl_model.parameters import Part
from mindvl_model.weights.directory import as_dtype, new_directory

_EXPERTS_PATTERN = r"mlp\.experts\.gate_up_proj"
_NOT_LINEAR = ("model.visual.patch_embed.proj", "model.language_model.embed_tokens", "lm_head")
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
    with new_directory(out) as directory:
        tensors = {name: as_dtype(tensor, dtype).cpu() for name, tensor in _peft_tensors(targets, lora, read)}
        save_file(tensors, directory / WEIGHTS, {"format": "pt"})
        document = _adapter_config(config, lora, targets, base)
        (directory / CONFIG).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def _peft_tensors(targets: dict[str, Target], lora: LoRAConfig, read: Read) -> Iterator[tuple[str, Tensor]]:
    for target in targets.values():
        if target.experts:
            yield from _expert_tensors(target, targets, read)
            continue
        for index in target.chosen:
            published = f"{PREFIX}{target.published[index]}"
            for name, tensor in zip("AB", published_factors(target, index, read), strict=True):
                yield f"{published}.lora_{name}.weight", tensor.contiguous()
            if lora.dora:
                norms = read(f"{target.layer}.lora.{target.key(index)}.M")
                norms = target.rule.split(norms)[0] if len(target.published) == 1 else norms
                yield f"{published}.{NORMS}", norms.contiguous()


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
    prefix = f"{PREFIX}{experts_module(target)}." + ("base_layer." if both else "")  # PEFT nests the wrappers
    yield f"{prefix}lora_A.weight", a.reshape(-1, a.shape[2]).contiguous()
    yield f"{prefix}lora_B.weight", b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous()


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
        "use_dora": lora.dora,
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
