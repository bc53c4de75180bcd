# SPDX-License-Identifier: Apache-2.0
"""What is rehearsed: a recipe, a device, a world size, one rank, and the pack of every microbatch.

Comes after the recipe, before rehearse.py and the process of the rank; needs neither torch_npu nor megatron-core.
"""

import hashlib
import importlib.metadata
from dataclasses import dataclass, replace
from typing import Literal

from mindvl_model import TokenConfig
from mindvl_model.adapters.lora_config import quantization_problem
from mindvl_train.config import RunConfig
from mindvl_train.devices import DEVICES, find_device
from mindvl_train.errors import TrainError
from mindvl_train.layout_search.packs import Pack
from mindvl_train.layout_search.request import request_of
from mindvl_train.layout_search.step_time import Machine
from mindvl_train.resolved_run import resolve_run

Kind = Literal["npu", "cuda", "cpu"]
_VERSIONS = ("mindvl-train", "mindvl-model", "mindvl-ops", "megatron-core", "torch", "torch-npu")
# Token ids without a tokenizer; RandomBatch draws text from the ids above.
TOKENS = TokenConfig(image=1, vision_start=2, vision_end=3, end_of_turn=4, pad=0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank of one run."""

    recipe: str  # path or name, for the record
    config: RunConfig
    device: str
    world_size: int
    rank: int
    steps: int
    pack: Pack

    @property
    def kind(self) -> Kind:
        """Kind of the device."""
        return kind_of(self.device)

    @property
    def digest(self) -> str:
        """SHA-256 of everything but the rank: configuration, device, world size, steps, pack."""
        text = repr(replace(self, rank=0, recipe=""))
        return hashlib.sha256(text.encode()).hexdigest()


def kind_of(device: str) -> Kind:
    """The kind of a device from the device table, or "cpu".

    Raises:
        TrainError: The device is not in the table.
    """
    if device in ("npu", "cuda", "cpu"):
        return device  # type: ignore[return-value]
    found = find_device(device)
    if found is None:
        known = ", ".join(each.name.lower() for each in DEVICES)
        raise TrainError(f"--device {device}: is unknown. Use one of: {known}, cpu.")
    return "npu" if found.name.startswith("910") else "cuda"


def job_of(
    config: RunConfig, *, recipe: str, device: str, world_size: int, rank: int, steps: int = 2, pack: Pack | None = None
) -> Job:
    """The job of one rank of a recipe, with the largest pack that the recipe allows.

    Args:
        pack: Pack of every microbatch; None: the largest.

    Raises:
        TrainError: The layout does not fit the world size, the rank does not exist, or the device is unknown or cannot have
            the quantized weights of the recipe.
    """
    resolve_run(config, world_size)
    if not 0 <= rank < world_size:
        raise TrainError(f"--ranks {rank}: does not exist among {world_size} ranks. Use 0 to {world_size - 1}.")
    if steps < 1:
        raise TrainError(f"--steps: must be >= 1, got {steps}.")
    problem = quantization_problem(config.adapter, kind_of(device))
    if problem is not None:
        raise TrainError(problem)
    # Only the pack of the request is used, which is the same on every machine.
    pack = pack or request_of(config, Machine(device=DEVICES[0], num_devices=world_size)).full_pack
    return Job(recipe=recipe, config=config, device=device, world_size=world_size, rank=rank, steps=steps, pack=pack)


def versions() -> dict[str, str]:
    """Installed versions that a record depends on."""
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described(pack: Pack) -> dict[str, int]:
    """Sizes of a pack for the record."""
    return {"tokens": pack.tokens, "patches": pack.patches, "segments": len(pack.segments)}
