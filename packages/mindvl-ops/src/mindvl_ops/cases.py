# SPDX-License-Identifier: Apache-2.0
"""One seeded call of every operator, small or large, which `check_operators` compares and times.

Each operator registers its call beside its reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A call of one operator."""

    function: Callable[..., Tensor]  # tensors -> all results of the public function, joined in one tensor
    inputs: tuple[Tensor, ...]  # floating point, on the CPU; gradients are computed for all of them
    trains: bool = True  # whether there are gradients


@dataclass(frozen=True)
class Inputs:
    """Where a case takes its random inputs from."""

    dtype: torch.dtype
    tokens: int  # size of the inputs, a multiple of 32
    seed: int
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.generator.manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal values of the given shape."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


CaseMaker = Callable[[Inputs], Case]

_MAKERS: dict[str, CaseMaker] = {}


def case_of(operator: str) -> Callable[[CaseMaker], CaseMaker]:
    """Decorator that registers a function as the maker of an operator's case."""

    def enter(maker: CaseMaker) -> CaseMaker:
        _MAKERS[operator] = maker
        return maker

    return enter


def cases(dtype: torch.dtype, *, tokens: int = 64, seed: int = 0) -> dict[str, Case]:
    """The case of every operator, by name.

    Args:
        dtype: Type of the inputs.
        tokens: Size of the inputs, a multiple of 32.
        seed: Seed of the inputs; those of one operator do not depend on the other operators.
    """
    return {operator: maker(Inputs(dtype, tokens, seed)) for operator, maker in sorted(_MAKERS.items())}


def joined(results: tuple[Tensor, ...]) -> Tensor:
    """Several results as one vector."""
    return torch.cat([result.flatten() for result in results])
