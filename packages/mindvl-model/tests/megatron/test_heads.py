# SPDX-License-Identifier: Apache-2.0
"""Each context-parallel rank gets the key-value heads of its query heads; several ranks are compared in test_layouts.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.mark.parametrize(("num_kv", "size"), [(4, 2), (2, 4), (1, 4), (6, 4)])
def test_a_rank_gets_the_key_value_heads_of_its_query_heads(
    monkeypatch: pytest.MonkeyPatch, num_kv: int, size: int
) -> None:
    from mindvl_model.megatron import heads

    num_heads = 12
    group: Any = SimpleNamespace(size=lambda: size)
    monkeypatch.setattr(heads, "all_to_all", lambda group, parts: parts)  # what this rank sends to each rank
    query = torch.arange(num_heads)[None, :, None].float().expand(1, -1, 3)
    key = torch.arange(num_kv)[None, :, None].float().expand(1, -1, 3)
    own_query, own_key, own_value = heads.to_whole_pack(query, key, key[..., :2] + 100, group)
    assert (own_query.shape, own_value.shape[2]) == ((size, num_heads // size, 3), 2)
    for rank in range(size):
        queries, keys = own_query[rank, :, 0].tolist(), own_key[rank, :, 0].tolist()
        assert queries == list(range(rank * num_heads // size, (rank + 1) * num_heads // size))
        used = [keys[place * len(keys) // len(queries)] for place in range(len(queries))]
        assert used == [query // (num_heads // num_kv) for query in queries]
        assert own_value[rank, :, 0].tolist() == [number + 100 for number in keys]
