# SPDX-License-Identifier: Apache-2.0
"""The grid of image size limits of a test-time resolution search.

Limits are counted in areas of a visual token, as in the paper's section on test-time resolution search: min 4, 16, 32, 64
and max 1280, 2048, 2560, 3072, 4096, 8192. A visual token of the paper's models is 28x28 pixels (patch 14, merge 2); that of
another model follows from its processor.
"""

from dataclasses import dataclass, replace

from mindvl_merge.errors import MergeConfigError

PAPER_UNIT_SIDE = 28  # side of a visual token of the paper's models, in pixels; for callers without a model


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One pair of limits, in pixels."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class ResolutionGrid:
    """Every pair of a minimum and a maximum; pairs with min > max are omitted."""

    min_units: tuple[int, ...]
    max_units: tuple[int, ...]
    unit_pixels: int | None = None  # area of one visual token; None: that of the searched model, or the paper's

    def __post_init__(self) -> None:
        for name in ("min_units", "max_units"):
            units = getattr(self, name)
            if not units or min(units) <= 0 or len(set(units)) != len(units):
                raise MergeConfigError(
                    f"grid: {name} must be different positive integers, got {units}. Correct the grid."
                )
        if not self.cells():
            raise MergeConfigError(
                f"grid: every minimum of {self.min_units} is above every maximum of {self.max_units}. Swap them."
            )

    @classmethod
    def paper(cls) -> "ResolutionGrid":
        """The 24 cells of the paper."""
        return cls(min_units=(4, 16, 32, 64), max_units=(1280, 2048, 2560, 3072, 4096, 8192))

    @classmethod
    def parse(cls, text: str) -> "ResolutionGrid":
        """`paper`, or minimums and maximums such as `4,16x64,128`, in visual tokens."""
        if text == "paper":
            return cls.paper()
        try:
            minimums, maximums = text.split("x")
            return cls(
                min_units=tuple(int(unit) for unit in minimums.split(",")),
                max_units=tuple(int(unit) for unit in maximums.split(",")),
            )
        except MergeConfigError:
            raise
        except ValueError as error:
            raise MergeConfigError(
                f"grid: {text!r} is not a grid. Write paper, or MIN,MIN,...xMAX,MAX,... such as 4,16x64,128."
            ) from error

    @property
    def pixels_per_unit(self) -> int:
        """Area of one visual token in pixels."""
        return PAPER_UNIT_SIDE**2 if self.unit_pixels is None else self.unit_pixels

    def for_model(self, side: int) -> "ResolutionGrid":
        """The same grid in visual tokens of `side` x `side` pixels, unless `unit_pixels` was given."""
        return replace(self, unit_pixels=side**2) if self.unit_pixels is None else self

    def cells(self) -> list[Cell]:
        """All cells, minimum by minimum."""
        unit = self.pixels_per_unit
        return [
            Cell(min_pixels=low * unit, max_pixels=high * unit)
            for low in self.min_units
            for high in self.max_units
            if low <= high
        ]
