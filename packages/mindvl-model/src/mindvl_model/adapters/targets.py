# SPDX-License-Identifier: Apache-2.0
"""The linear layers that get adapters: from names of published layers to weights of the model.

A weight of the model may join several published layers, such as q_proj, k_proj and v_proj; each has matrices of its own,
so that an export is exact. Pure functions of the configuration; comes before megatron/lora.py.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mindvl_model.adapters.lora_config import ALL_LINEAR, LoRAConfig
from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.parameters import PARTS, Part, parameter_group
from mindvl_model.weights.names import weight_rules
from mindvl_model.weights.rules import WeightRule
from mindvl_model.weights.sharding import split_kind

_LINEAR = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "fc1", "fc2"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
)


@dataclass(frozen=True)
class Target:
    """A linear layer of the model with adapters for some of its published layers."""

    layer: str  # global name of the linear layer
    rule: WeightRule  # rule of its weight
    published: tuple[str, ...]  # names of the published layers in the order of the rule, without ".weight"
    chosen: tuple[int, ...]  # indices of those that get adapters; for experts, of the layers of one expert

    @property
    def experts(self) -> bool:
        """Whether the layer has one matrix per expert."""
        return split_kind(self.rule.param_name) == "experts"

    @property
    def per_expert(self) -> int:
        """Number of published layers of one expert, or of all if the layer has no experts."""
        return (1 if self.layer.endswith("linear_fc2") else 2) if self.experts else len(self.published)

    def key(self, index: int) -> str:
        """Name of the adapter of a published layer in the model: its last component."""
        return self.published[index].rsplit(".", 1)[-1]

    def published_of(self, index: int) -> Iterator[str]:
        """The published layers of one adapter: several for experts, in their order."""
        yield from self.published[index :: self.per_expert] if self.experts else (self.published[index],)


def find_targets(config: MindVLConfig, lora: LoRAConfig, parts: Iterable[Part] = PARTS) -> dict[str, Target]:
    """The layers of these parts that get adapters, by global name, in the order of the model.

    Layers of multi-token prediction get none, because transformers does not have them.

    Raises:
        ModelError: A target matches no layer, only some experts, or experts get dropout or DoRA.
    """
    linear = {layer: target for layer, target in _linear_layers(config) if parameter_group(layer) in set(parts)}
    for target in lora.targets:
        if target != ALL_LINEAR and not any(
            _matches(name, target) for one in linear.values() for name in one.published
        ):
            raise ModelError(_unknown(target, linear.values()))
    found = {}
    for layer, one in linear.items():
        chosen = [ALL_LINEAR in lora.targets or any(_matches(name, t) for t in lora.targets) for name in one.published]
        indices = tuple(index for index in range(one.per_expert) if chosen[index])
        if one.experts:
            by_expert = {
                tuple(chosen[start : start + one.per_expert]) for start in range(0, len(chosen), one.per_expert)
            }
            if len(by_expert) > 1:
                raise ModelError(
                    f"adapter.targets: {list(lora.targets)} selects some experts of {layer} only. Use the last component "
                    "of the name, such as gate_proj, which selects all."
                )
            for name, value, off in (("dropout", lora.dropout, 0), ("dora", lora.dora, "false")):
                if indices and value:
                    raise ModelError(
                        f"adapter.{name}: is {value}, but the experts of {layer} are targets, for which PEFT has no {name}. Set "
                        f"adapter.{name}={off}, or set adapter.targets to layers outside the experts."
                    )
        if indices:
            found[layer] = Target(layer, one.rule, one.published, indices)
    return found


def published_layers(config: MindVLConfig, parts: Iterable[Part] = PARTS) -> list[str]:
    """Names of all published linear layers of these parts that can get adapters."""
    return [
        name for layer, one in _linear_layers(config) if parameter_group(layer) in set(parts) for name in one.published
    ]


def linear_layers(config: MindVLConfig) -> set[str]:
    """Global names of the layers of the model that can get adapters."""
    return {layer for layer, _ in _linear_layers(config)}


def _linear_layers(config: MindVLConfig) -> Iterator[tuple[str, Target]]:
    for rule in weight_rules(config):
        layer, kind = rule.param_name.rsplit(".", 1)
        if kind == "weight" and layer.rsplit(".", 1)[-1] in _LINEAR and not layer.startswith("language.mtp."):
            names = tuple(name.removesuffix(".weight") for name in rule.hf_names)
            yield layer, Target(layer, rule, names, ())


def _matches(name: str, target: str) -> bool:
    """As PEFT compares names of modules: equal, or equal from a dot on."""
    return name == target or name.endswith(f".{target}")


def _unknown(target: str, layers: Iterable[Target]) -> str:
    known = sorted({_short(name) for one in layers for name in one.published})
    near = difflib.get_close_matches(target, known, n=1)
    remedy = f"Use {near[0]!r}, the nearest known name" if near else "Use a known name"
    return f"adapter.targets: {target!r} matches no linear layer of the trained parts. {remedy}; known: {', '.join(known)}."


def _short(name: str) -> str:
    """The shortest name that says what a layer is: two components if the last is a number, as in mlp.0."""
    components = name.split(".")
    return ".".join(components[-2:]) if components[-1].isdigit() else components[-1]
