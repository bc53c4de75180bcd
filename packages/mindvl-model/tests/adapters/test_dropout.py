# SPDX-License-Identifier: Apache-2.0
"""Dropout masks: the rate, independence of layers, rows and columns, and equality of slices with the whole."""

import torch

from mindvl_model.adapters.dropout import keep_mask, layer_key, mixed, pack_key, row_keys


def test_a_slice_of_rows_and_columns_has_the_mask_of_the_whole() -> None:
    keys = row_keys(pack_key(torch.arange(40), 0, step=3), torch.arange(40))
    whole = keep_mask(keys, layer_key("a"), 0, 64, 0.25)
    assert torch.equal(keep_mask(keys[10:30], layer_key("a"), 16, 24, 0.25), whole[10:30, 16:40])


def test_elements_are_kept_with_the_wanted_probability_and_independently() -> None:
    keys = row_keys(pack_key(torch.arange(500), 0, step=0), torch.arange(500))
    one, other = (keep_mask(keys, layer_key(name), 0, 400, 0.1).double() for name in ("a", "b"))
    assert abs(one.mean() - 0.9) < 0.003  # 7 standard deviations of 200,000 draws
    for first, second in ((one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1])):
        assert abs(((first - 0.9) * (second - 0.9)).mean()) < 0.0015
    assert one.mean(0).min() > 0.8
    assert one.mean(1).min() > 0.8


def test_padding_does_not_change_the_key_of_a_pack_but_tokens_and_step_do() -> None:
    ids = torch.tensor([5, 6, 7])
    key = pack_key(ids, 0, step=1)
    assert torch.equal(pack_key(torch.tensor([5, 6, 7, 0, 0]), 0, step=1), key)
    assert not torch.equal(pack_key(ids, 0, step=2), key)
    assert not torch.equal(pack_key(torch.tensor([6, 5, 7]), 0, step=1), key)


def test_the_hash_is_lowbias32() -> None:
    def by_hand(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    values = [0, 1, 12345, 2**31, 2**32 - 1]
    assert mixed(torch.tensor(values)).tolist() == [by_hand(value) for value in values]
