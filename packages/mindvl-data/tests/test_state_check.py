# SPDX-License-Identifier: Apache-2.0
"""A saved state is looked at before it is used: what no data_order saved is named, whatever its checksum says."""

import base64
import hashlib
import json
import zlib
from typing import Any

import pytest

from mindvl_data import DataError
from mindvl_data.state_check import pack_samples, unpack_samples
from mindvl_data.tracker import open_state, seal_state

NAMES = {"seed": "3", "settings of a": "weight=1.0", "index of a": "1234"}
ORDER = {
    "step": 4,
    "derived": [30.0, 1.5, 400],
    "totals": {"samples": 29},
    "tokens_by_source": {"a": 900},
    "drawn_at": [[2, 7]],
    "owed": [0.0],
    "buffer": [[0, 2, 1, 5, 40, 16]],
    "window": [[1]],
    "drawn": {"a": 30},
    "dropped": {},
}


def digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    "damage",
    [
        {"drawn_at": [[2]]}, {"drawn_at": [[2, 7], [0, 0]]}, {"drawn_at": 3}, {"owed": [float("nan")]}, {"owed": ["1"]},
        {"step": -1}, {"step": "4"}, {"step": 10**40}, {"buffer": [[5, 2, 1, 5, 40, 16]]}, {"window": [[10**12]]},
        {"buffer": [[1, 2, 1, 5, 40, 16]]},
        {"window": 5}, {"window": [["x"]]}, {"drawn": []}, {"totals": {"samples": None}}, {"derived": "no"},
    ],
)  # fmt: skip
def test_a_forged_state_with_a_right_checksum_is_named_as_damaged(damage: dict[str, Any]) -> None:
    sealed = seal_state(ORDER, NAMES, sources=["a"])
    if "buffer" in damage:
        sealed = seal_state(ORDER | damage, NAMES, sources=["a"])
    else:
        body = {name: value for name, value in sealed.items() if name != "checksum"}
        body["order"] = sealed["order"] | damage
        sealed = {**body, "checksum": digest(body)}
    with pytest.raises(DataError, match=r"^checkpoint: the ledger state is damaged \("):
        open_state(sealed, NAMES, sources=["a"])


@pytest.mark.slow
def test_packed_samples_come_back_and_what_is_none_is_refused() -> None:
    assert unpack_samples(pack_samples([[0, 2, 1, 5, 40, 16]] * 3)) == [[0, 2, 1, 5, 40, 16]] * 3
    assert unpack_samples(pack_samples([])) == []
    bomb = base64.b64encode(zlib.compress(bytes(100 << 20))).decode()
    for text in ("", "?", "AAAA", bomb, base64.b64encode(zlib.compress(b"12345")).decode(), 5, "\u00e9"):
        with pytest.raises(ValueError, match="buffer"):
            unpack_samples(text)
