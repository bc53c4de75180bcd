# SPDX-License-Identifier: Apache-2.0
"""Configuration of low-rank adapters (LoRA, arXiv 2106.09685), with the meaning that the fields have in PEFT.

The section `adapter` of a recipe; comes before targets.py, which finds the layers.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import Literal

ALL_LINEAR = "all-linear"
BLOCK_SIZE = 64  # consecutive elements of a quantized weight that share a scale
_NESTED_BLOCK_SIZE = 256  # scales that share a scale with double quantization


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters: W x + scaling * B A x for each target layer; only A and B are trained."""

    kind: Literal["lora"] = "lora"  # Kind of adapter: low-rank matrices beside frozen linear layers.
    rank: int = 16  # number of rows of A and of columns of B
    alpha: float = 32.0  # numerator of the scaling: alpha / rank, or alpha / sqrt(rank) with rslora
    dropout: float = 0.0  # probability with which an element of the input of A is set to zero; not for experts
    # Linear layers of the trained parts, by their names in the published directory: the last component, such as q_proj,
    # or a longer suffix; all-linear: every linear layer but the output layer and routers.
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False  # divide alpha by the square root of the rank (arXiv 2312.03732)
    dora: bool = False  # also train the norm of each row of the adapted weights (arXiv 2402.09353); not for experts
    # Bits of the frozen weights of linear layers, by bitsandbytes: 16 keeps the precision of the run, 8 is blockwise, 4 is
    # NF4 (arXiv 2305.14314). On CUDA and CPU.
    base_bits: Literal[16, 8, 4] = 16
    double_quantization: bool = True  # store the scales of quantized weights in 8 bits; without effect on 16 bits

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 1 << 16:
            raise ValueError(f"rank: must be between 1 and 65,536, got {self.rank}. Use for example 16.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha: must be a finite number > 0, got {self.alpha}. Use for example twice the rank.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: must be in [0, 1), got {self.dropout}. Use for example 0.05.")
        if self.dora and self.dropout:
            raise ValueError(
                f"dropout: is {self.dropout}, but DoRA in PEFT would drop the inputs of the frozen weights too. Set dropout=0, "
                "or dora=false."
            )
        if not self.targets or "" in self.targets:
            raise ValueError(
                "targets: must name at least one layer. Name for example q_proj and v_proj, or all-linear."
            )

    @property
    def base_bytes(self) -> float | None:
        """Bytes of a quantized weight with its share of the scales; None if weights are not quantized."""
        if self.base_bits == 16:
            return None
        scale = 1 + 4 / _NESTED_BLOCK_SIZE if self.double_quantization else 4
        return self.base_bits / 8 + scale / BLOCK_SIZE

    @property
    def scaling(self) -> float:
        """Factor of the product of both matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def quantization_problem(lora: LoRAConfig | None, kind: str) -> str | None:
    """Why the weights below adapters cannot be quantized on a kind of device, such as cuda; None if they can, or are not."""
    if lora is None or lora.base_bits == 16:
        return None
    if kind == "npu":
        return f"adapter.base_bits: is {lora.base_bits}, but bitsandbytes has no kernels for NPUs. Set adapter.base_bits=16."
    if importlib.util.find_spec("bitsandbytes") is None:
        return (
            f"adapter.base_bits: is {lora.base_bits}, but the package bitsandbytes is not installed. Run pip install "
            "'mindvl-model[quantized]', or set adapter.base_bits=16."
        )
    return None
