# SPDX-License-Identifier: Apache-2.0
"""Attach low-rank adapters to a built model, freeze everything else, and initialize the adapters.

Comes after the weights of the model are loaded and before gradient buffers. The model keeps its modules and the names of
its weights; each target layer gets the child `lora`.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindvl_model.adapters.dropout import pack_key, row_keys
from mindvl_model.adapters.lora_config import LoRAConfig
from mindvl_model.adapters.peft_directory import PeftDirectory
from mindvl_model.adapters.targets import find_targets
from mindvl_model.config import MindVLConfig
from mindvl_model.megatron.lora import ADAPTED, DropoutRows, LowRank
from mindvl_model.megatron.replicas import mark_whole, tensor_and_context_rank
from mindvl_model.megatron.share import global_name
from mindvl_model.parameters import PARTS, Part, parameter_group
from mindvl_model.vision.spread import take_ranges, vision_shard


def add_adapters(model: Any, config: MindVLConfig, lora: LoRAConfig, parts: Iterable[Part] = PARTS) -> None:
    """Attach adapters to the target layers of a model, or of one pipeline stage, and freeze all other parameters.

    Their A has no value and their B is zero: call `initialize_adapters`, or read them.

    Args:
        model: A MindVLModel.
        config: Configuration of the whole model.
        lora: Configuration of the adapters.
        parts: Parts whose layers may get adapters.

    Raises:
        ModelError: The targets do not fit the model.
    """
    targets = find_targets(config, lora, parts)
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        target = targets.get(_global_layer(model, name))
        if target is None or type(linear) not in ADAPTED:
            continue
        low_rank = LowRank(target, lora, linear)
        if model.parallel.spread_images and parameter_group(name) != "language":
            mark_whole(low_rank)
        linear.__class__ = ADAPTED[type(linear)]  # megatron-core builds layers without a way to add children
        linear.lora = low_rank
    _require_input_gradients(model)
    if lora.dropout:
        _DropoutHooks(model).install()


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, LowRank]]:
    """The adapters of a model by the local name of their module."""
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            yield name, module


def is_adapter(param_name: str) -> bool:
    """Whether a parameter, by its name in the model or in a checkpoint, belongs to an adapter."""
    return ".lora." in param_name


def set_dropout_step(models: Iterable[Any], step: int) -> None:
    """Set the optimizer step on which dropout masks depend; call before the forward passes of a step."""
    for model in models:
        # Gradient buffers, precision wrapper.
        while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
            model = inner
        hooks = getattr(model, "dropout_hooks", None)
        if hooks is not None:
            hooks.step = step


@torch.no_grad()
def initialize_adapters(model: Any, seed: int) -> None:
    """Initialize A as PEFT does, uniform in +-1/sqrt(in), by a generator seeded by the published name; B is zero.

    The norms of DoRA have no value: call `initialize_norms`, or read them.
    """
    for _, low_rank in adapted_layers(model):
        target = low_rank.target
        for index in target.chosen:
            factors = low_rank.get_submodule(target.key(index))
            factors.B.zero_()  # type: ignore[operator]
            a: Any = factors.A
            if target.experts:
                names = list(target.published_of(index))[a.first_expert :][: len(a)]
                for expert, name in zip(a, names, strict=True):
                    expert.copy_(_drawn(name, (expert.shape[1], expert.shape[0]), seed).T)
                continue
            columns = a.shape[1] * low_rank.size if low_rank.is_row else a.shape[1]
            whole = _drawn(target.published[index], (a.shape[0], columns), seed)
            first = low_rank.tp_rank * a.shape[1] if low_rank.is_row else 0
            a.copy_(whole.narrow(1, first, a.shape[1]))


def initialize_norms(model: Any) -> None:
    """Set the norms of DoRA to those of the rows of the adapted weights; needs the model on its device, for a reduction."""
    for name, low_rank in adapted_layers(model):
        if low_rank.dora:
            low_rank.reset_norms(model.get_submodule(name.removesuffix(".lora")))


@torch.no_grad()
def fill_adapters(model: Any, directory: PeftDirectory) -> None:
    """Set the adapters of a model to those of a PEFT directory, which has been checked; each rank takes its shard.

    Of a layer whose adapter has a smaller rank the other rows of A keep their values, and the other columns of B are zero.
    """
    for _, low_rank in adapted_layers(model):
        target = low_rank.target
        for index in target.chosen:
            factors: Any = low_rank.get_submodule(target.key(index))
            if target.experts:
                for local in range(len(factors.A)):
                    found = directory.read(target, index, factors.A.first_expert + local)
                    a, b = found.a, found.with_scaling(low_rank.scaling)
                    factors.A[local].narrow(1, 0, len(a)).copy_(a.T)
                    factors.B[local].zero_().narrow(0, 0, len(a)).copy_(b.T)
                continue
            found = directory.read(target, index)
            rank, first, b = len(found.a), low_rank.tp_rank, found.with_scaling(low_rank.scaling)
            own_a, own_b = factors.A.narrow(0, 0, rank), factors.B.zero_().narrow(1, 0, rank)
            width, rows = own_a.shape[1], own_b.shape[0]
            own_a.copy_(found.a.narrow(1, first * width if width != found.a.shape[1] else 0, width))
            for whole, own in ((b, own_b), *([] if found.norms is None else [(found.norms, factors.M)])):
                whole = target.rule.join([whole]) if len(target.published) == 1 else whole
                own.copy_(whole.narrow(0, first * rows if rows != len(whole) else 0, rows))


def _drawn(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}.lora_A".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _global_layer(model: Any, name: str) -> str:
    return global_name(model, f"{name}.weight").removesuffix(".weight")


def _require_input_gradients(model: Any) -> None:
    """Let recomputed blocks compute gradients although no parameter before them is trained.

    megatron-core recomputes a layer only if one of its inputs requires a gradient.
    """

    def require(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for values in (args, kwargs.values()):
            for value in values:
                if (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and not value.requires_grad
                    and value.is_leaf
                ):
                    value.requires_grad_(torch.is_grad_enabled())
        return args, kwargs

    if model.vision is not None and any(True for _ in adapted_layers(model.vision)):
        model.vision.blocks.register_forward_pre_hook(require, with_kwargs=True)
    if any(True for _ in adapted_layers(model.language)):
        model.language.register_forward_pre_hook(require, with_kwargs=True)


class _DropoutHooks:
    """Gives every adapter the keys of the rows that it sees.

    Layers get them from the packed sequence, which a recomputed layer gets again.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.step = model, 0
        self._key: Tensor | None = None
        self._patches: Tensor | None = None  # positions of this rank's patches in those of the pack

    def install(self) -> None:
        model = self.model
        model.dropout_hooks = self
        model.register_forward_pre_hook(self._begin_pack, with_kwargs=True)
        self._install_in_blocks(model.language)
        model.language.register_forward_pre_hook(self._begin_language, with_kwargs=True)
        if model.vision is not None:
            self._install_in_blocks(model.vision)
            model.vision.register_forward_pre_hook(self._begin_vision, with_kwargs=True)
            model.vision.blocks.register_forward_pre_hook(self._begin_blocks, with_kwargs=True)
            self._projector_rows = DropoutRows()
            for _, low_rank in adapted_layers(model.projector):
                low_rank.dropout_rows = self._projector_rows

    def _install_in_blocks(self, part: torch.nn.Module) -> None:
        for layer in part.modules():
            if not hasattr(layer, "self_attention"):
                continue
            rows = DropoutRows()
            for _, low_rank in adapted_layers(layer):
                low_rank.dropout_rows = rows

            def take(_: Any, args: Any, kwargs: dict[str, Any], rows: DropoutRows = rows) -> None:
                rows.keys = kwargs["packed_seq_params"].dropout_rows

            layer.register_forward_pre_hook(take, with_kwargs=True)

    def _begin_pack(self, _: Any, args: Any, inputs: dict[str, Any]) -> None:
        model, ids = self.model, inputs["input_ids"]
        if not torch.is_grad_enabled():  # a validation, which uses no dropout
            self._key = None
            return
        self._key = pack_key(ids, model.mindvl.tokens.pad, self.step)
        self._patches = None
        if model.vision is None:
            return
        images, videos = ([tuple(g) for g in inputs[name].tolist()] if inputs.get(name) is not None else []
                          for name in ("image_grid_thw", "video_grid_thw"))  # fmt: skip
        counts = [sum(t * h * w for t, h, w in grids) for grids in (images, videos)]
        positions = torch.arange(sum(counts))
        if model.parallel.spread_images and (images or videos):
            shard = vision_shard(images, videos, model.mindvl.vision.spatial_merge_size, *tensor_and_context_rank())
            parts = positions.split(counts)
            positions = torch.cat(
                [take_ranges(parts[0], shard.image_ranges), take_ranges(parts[1], shard.video_ranges)]
            )
        self._patches = positions.to(ids.device)

    def _begin_language(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        pack = kwargs["packed_seq_params"]
        if self._key is None:
            return
        positions = torch.arange(len(pack.input_ids), device=self._key.device)
        pack.dropout_rows = row_keys(self._key, pack.own_slice(positions))

    def _begin_vision(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        order, unit = args[1], self.model.mindvl.vision.spatial_merge_size**2
        if self._key is None:
            self._vision_rows = self._projector_rows.keys = None
            return
        device, count = self._key.device, len(order.positions)
        positions = self._patches
        if positions is None or len(positions) != count:  # the blank image of a pack without images
            positions = torch.arange(count, device=device)
        positions = positions.view(-1, unit)
        if order.order is not None:
            positions = positions[order.order.to(device)]
        self._vision_rows = row_keys(self._key, positions.flatten())
        self._projector_rows.keys = self._vision_rows.view(-1, unit)[:, 0]

    def _begin_blocks(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kwargs["packed_seq_params"].dropout_rows = self._vision_rows
