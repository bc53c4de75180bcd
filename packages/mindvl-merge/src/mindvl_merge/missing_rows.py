# SPDX-License-Identifier: Apache-2.0
"""Values of rows of the vocabulary that some parents do not have, so that a merge gives no model more weight for them.

Comes after quantization.py read the values of all parents, before methods/ combine them. A model without a row takes the row of
the base, from which it then does not differ; without a base it takes the weighted mean of the models that have the row, so that
the weights of these models keep their ratios.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from .methods.values import Values

if TYPE_CHECKING:
    from .sources import OutputTensor


def fill_missing_rows(tensor: "OutputTensor", blocks: Sequence[Values], begin: int, end: int) -> list[Values]:
    """Replace rows that a parent does not have.

    Args:
        blocks: Values `begin` to `end` of the flattened result from every parent, models before the base.
    """
    columns, filled = prod(tensor.info.shape[1:]), list(blocks)
    first, last = begin // columns if columns else 0, -(-end // columns) if columns else 0
    parts = [None if source.rows is None else source.rows[first:last] < 0 for source in tensor.sources]
    if not any(part is not None and part.any() for part in parts):
        return filled
    row_of = np.arange(begin, end) // columns - first
    absent = [np.zeros(end - begin, bool) if part is None else part[row_of] for part in parts]
    num_models = len(tensor.weights)
    shares = np.array([np.where(absent[i], 0.0, tensor.weights[i]) for i in range(num_models)])
    total = shares.sum(axis=0)
    equal = np.array([~absent[i] for i in range(num_models)], np.float64)  # where all models with the row have weight 0
    shares = np.where(np.abs(total) > 1e-12, shares, equal)
    values = np.array([blocks[i].astype(np.float64) for i in range(num_models)])
    replacement = (shares * values).sum(axis=0) / shares.sum(axis=0)
    if len(blocks) > num_models:  # with a base
        base = np.where(absent[-1], replacement, blocks[-1].astype(np.float64))
        replacement, filled[-1] = base, base.astype(np.float32)
    for number in range(num_models):
        if absent[number].any():
            filled[number] = np.where(absent[number], replacement, values[number]).astype(np.float32)
    return filled
