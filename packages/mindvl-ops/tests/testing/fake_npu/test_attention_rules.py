# SPDX-License-Identifier: Apache-2.0
"""Every rule of fused attention is broken once and refused with words that name it; the same call unbroken passes."""

import pytest
import torch

from mindvl_ops.errors import OpsError
from mindvl_ops.testing.fake_npu import RefusedError
from mindvl_ops.testing.fake_npu.attention_masks import compressed_mask

F32 = torch.float32


def _r(*shape, dtype=F32):
    return torch.zeros(*shape, dtype=dtype)


def _mask(*shape):
    return torch.zeros(*shape, dtype=torch.bool)


def _packed(lengths=(4, 6), kv_lengths=None, heads=4, kv_heads=2, size=16):
    kv_lengths = kv_lengths or lengths
    ends = [[sum(each[: i + 1]) for i in range(len(each))] for each in (lengths, kv_lengths)]
    return {
        "query": _r(sum(lengths), heads, size),
        "key": _r(sum(kv_lengths), kv_heads, size),
        "value": _r(sum(kv_lengths), kv_heads, size),
        "head_num": heads,
        "input_layout": "TND",
        "actual_seq_qlen": ends[0],
        "actual_seq_kvlen": ends[1],
    }


def _dense(batch=2, heads=4, kv_heads=2, rows=5, columns=7, size=16):
    return {
        "query": _r(batch, heads, rows, size),
        "key": _r(batch, kv_heads, columns, size),
        "value": _r(batch, kv_heads, columns, size),
        "head_num": heads,
        "input_layout": "BNSD",
    }


CAUSAL = {"atten_mask": compressed_mask(3)}
PREFIX = {"atten_mask": compressed_mask(6), "sparse_mode": 6}

PACKED = [  # rule, what is changed in a valid packed call, words of the refusal
    ("heads above 0", {"head_num": 0}, "head_num must be above 0, got 0"),
    ("rank", {"query": _r(10, 64)}, "query has rank 2, must be 3 or 4"),
    ("keep probability", {"keep_prob": 0.0}, r"keep_prob 0.0 is outside \(0, 1\]"),
    ("known layout", {"input_layout": "NTD"}, "input_layout 'NTD' is none of"),
    ("upper case", {"input_layout": "tnd"}, "must be in upper case"),
    ("softmax layout", {"softmax_layout": "BSH"}, "softmax_layout 'BSH' is neither"),
    ("mode 5 is not packed", {"sparse_mode": 5}, "sparse_mode 5 is none of .* for TND"),
    ("mode above 8", {"sparse_mode": 9}, "sparse_mode 9 is none of"),
    ("ends missing", {"actual_seq_qlen": None}, "TND needs actual_seq_qlen"),
    ("ends empty", {"actual_seq_qlen": [], "actual_seq_kvlen": []}, "TND needs actual_seq_qlen"),
    ("ends of equal number", {"actual_seq_qlen": [10]}, "1 ends of queries and 2 of keys"),
    ("ends decrease", {"actual_seq_qlen": [6, 4]}, "cumulative ends .* of query decrease"),
    ("last end above T", {"actual_seq_qlen": [4, 11]}, "last end 11 is above T = 10 of query"),
    (
        "ends after a dropped sequence",
        {"actual_seq_qlen": [4, 0, 8], "actual_seq_kvlen": [4, 6, 8]},
        "follow a dropped",
    ),
    ("dropped on one side alone", {"actual_seq_qlen": [4, 0]}, "1 query sequences and 2 key sequences"),
    ("float types", {"query": _r(10, 4, 16, dtype=torch.float64)}, "query is torch.float64, supported are"),
    ("one type", {"key": _r(10, 2, 16, dtype=torch.bfloat16)}, "key is torch.bfloat16, query is torch.float32"),
    ("rank of the layout", {"query": _r(1, 10, 4, 16)}, "query has rank 4, layout is TND"),
    ("heads of query", {"head_num": 2}, "head_num 2 is not the 4 heads of query"),
    ("heads of key and value", {"value": _r(10, 1, 16)}, "key and value differ in heads"),
    ("group of heads", {"key": _r(10, 3, 16), "value": _r(10, 3, 16)}, "4 query heads are no multiple of 3"),
    ("one D", {"key": _r(10, 2, 8)}, "D of query 16 and of key 8 differ"),
    ("D of value", {"value": _r(10, 2, 17)}, "D of value 17 is above D of key 16"),
    ("D of the packed gradient", {"query": _r(10, 4, 520), "key": _r(10, 2, 520)}, "D = 520 is outside 1 to 512"),
    ("tokens of key and value", {"value": _r(11, 2, 16)}, r"key .* and value .* differ along T"),
    ("padding mask", {"padding_mask": _r(2)}, "padding_mask must be None"),
    ("sink type", {"sink": _r(4, dtype=torch.bfloat16)}, r"sink must be float32 \[4\]"),
    ("sink shape", {"sink": _r(2)}, r"sink must be float32 \[4\]"),
    ("pse with mode 7", {"pse": _r(2, 4, 6, 6), "sparse_mode": 7, **CAUSAL}, "pse is forbidden with sparse_mode 7"),
    (
        "pse with empty sequences",
        {"pse": _r(2, 4, 6, 6), "actual_seq_qlen": [0, 10], "actual_seq_kvlen": [0, 10]},
        "pse is forbidden with sequences of length 0",
    ),
    ("mask type", {"atten_mask": _r(6, 6)}, "atten_mask is torch.float32, must be bool or uint8"),
    ("mask shape", {"atten_mask": _mask(5, 6)}, r"atten_mask \[5, 6\] must be one of"),
    (
        "compressed mask",
        {"atten_mask": _mask(6, 6), "sparse_mode": 3},
        r"sparse_mode 3 needs atten_mask \[2048, 2048\]",
    ),
    ("mode 6 mask", {"atten_mask": _mask(6, 6), "sparse_mode": 6}, r"needs atten_mask \[3072, 2048\]"),
    ("band before 0", {"sparse_mode": 4, "pre_tockens": -1, **CAUSAL}, "sparse_mode 4 in TND needs pre >= 0"),
    (
        "band that closes",
        {"sparse_mode": 4, "pre_tockens": 1, "next_tockens": -2, **CAUSAL},
        r"pre 1 \+ next -2 is below 0",
    ),
    (
        "band that leaves rows out",
        {"sparse_mode": 4, "pre_tockens": 9, "next_tockens": -1, **CAUSAL},
        "needs Sq - next <= Skv",
    ),
    ("mode 7 pre", {"sparse_mode": 7, "pre_tockens": 5, "next_tockens": 0, **CAUSAL}, "needs pre >= 6, the last Skv"),
    ("mode 7 next", {"sparse_mode": 7, "next_tockens": 1, **CAUSAL}, "needs next in 0 to 0"),
    ("mode 8 pre", {"sparse_mode": 8, "pre_tockens": 3, "next_tockens": 0, **CAUSAL}, "needs pre >= 4, the first Skv"),
    ("mode 8 next", {"sparse_mode": 8, "next_tockens": -1, **CAUSAL}, "needs next >= 0"),
    ("prefix missing", PREFIX, "prefix must hold 2 values, got None"),
    ("prefix outside", {**PREFIX, "prefix": [5, 2]}, "prefix 5 is outside 0 to 4"),
]

STRICT = [  # flag, change, words
    ("mask_content", {"sparse_mode": 3, "atten_mask": ~compressed_mask(3)}, "must be triu"),
    ("mask_window", {"atten_mask": _mask(6, 6), "next_tockens": 0}, "sequence 0: pre/next tokens skip pairs"),
    ("masked_row", {"atten_mask": _mask(6, 6).index_fill(0, torch.tensor(1), True)}, "row of the mask is all True"),
    ("upper_case_layout", {"input_layout": "tnd"}, "upper case"),
    ("documented_limits", {"query": _r(10, 4, 520), "key": _r(10, 2, 520)}, "outside 1 to 512"),
]

DENSE = [
    ("softmax layout is for TND", {"softmax_layout": "TND"}, "goes with input_layout TND alone"),
    ("mode 7 is packed", {"sparse_mode": 7, **CAUSAL}, "sparse_mode 7 is none of"),
    ("D", {"query": _r(2, 4, 5, 769), "key": _r(2, 2, 7, 769)}, "D = 769 is outside 1 to 768"),
    ("one batch", {"query": _r(3, 4, 5, 16)}, r"batch sizes \[2, 3\] differ"),
    ("pse type", {"pse": _r(2, 4, 5, 7, dtype=torch.bfloat16)}, "pse is torch.bfloat16, query is torch.float32"),
    ("pse rank", {"pse": _r(4, 5, 7)}, "pse has rank 3, must be 4"),
    ("pse shape", {"pse": _r(2, 1, 5, 7)}, r"pse \[2, 1, 5, 7\] must be one of"),
    ("mask over heads alone", {"atten_mask": _mask(1, 4, 5, 7)}, r"atten_mask \[1, 4, 5, 7\] must be one of"),
    ("mode 5 mask", {"atten_mask": _mask(5, 7), "sparse_mode": 5, "prefix": [7, 7]}, r"atten_mask \[5, 7\] must be"),
    (
        "band beside the matrix",
        {"sparse_mode": 4, "pre_tockens": -100, "next_tockens": 100, **CAUSAL},
        "misses 5 x 7",
    ),
]


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in PACKED], ids=[row[0] for row in PACKED])
def test_a_broken_rule_of_a_packed_call_is_named(fake_npu, change, words):
    fake_npu.torch_npu.npu_fusion_attention(**_packed())
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_fusion_attention(**{**_packed(), **change})


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in DENSE], ids=[row[0] for row in DENSE])
def test_a_broken_rule_of_a_dense_call_is_named(fake_npu, change, words):
    fake_npu.torch_npu.npu_fusion_attention(**_dense())
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_fusion_attention(**{**_dense(), **change})


@pytest.mark.parametrize(("flag", "change", "words"), STRICT, ids=[row[0] for row in STRICT])
def test_what_the_hardware_does_not_notice_is_refused_until_its_flag_is_off(fake_npu, flag, change, words):
    call = {**_packed(), **change}
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_fusion_attention(**call)
    with fake_npu.relaxed(**{flag: False}):
        fake_npu.torch_npu.npu_fusion_attention(**call)


def test_mode_3_packed_wants_no_query_longer_than_its_keys(fake_npu):
    call = {**_packed((4, 3), (2, 5)), "sparse_mode": 3, **CAUSAL}
    with pytest.raises(RefusedError, match=r"Sq <= Skv in every sequence, got \[\(4, 2\)\]"):
        fake_npu.torch_npu.npu_fusion_attention(**call)


def test_mode_7_wants_it_of_every_sequence_but_the_last(fake_npu):
    call = {**_packed((4, 3), (2, 5)), "sparse_mode": 7, "next_tockens": 0, **CAUSAL}
    with pytest.raises(RefusedError, match=r"sparse_mode 7 needs Sq <= Skv"):
        fake_npu.torch_npu.npu_fusion_attention(**call)


def test_mode_5_wants_a_mask_that_agrees_with_its_prefix(fake_npu):
    i, j = torch.arange(5)[:, None], torch.arange(7)[None]
    keep = torch.stack([((j <= i + 2) | (j < prefix))[None] for prefix in (3, 6)])
    call = {**_dense(), "sparse_mode": 5, "prefix": [3, 6], "atten_mask": ~keep}
    fake_npu.torch_npu.npu_fusion_attention(**call)
    with pytest.raises(RefusedError, match="batch 1: atten_mask of sparse_mode 5 does not agree with prefix"):
        fake_npu.torch_npu.npu_fusion_attention(**{**call, "prefix": [3, 5]})


def test_a_prefix_serves_32_sequences_at_most(fake_npu):
    call = {**_dense(batch=33), **PREFIX, "prefix": [7] * 33}
    with pytest.raises(RefusedError, match="at most 32 sequences, got 33"):
        fake_npu.torch_npu.npu_fusion_attention(**call)


def test_widths_of_bsh_are_multiples(fake_npu):
    call = {"head_num": 4, "input_layout": "BSH", "value": _r(2, 7, 32), "key": _r(2, 7, 32), "query": _r(2, 5, 64)}
    fake_npu.torch_npu.npu_fusion_attention(**call)
    for change, words in (
        ({"query": _r(2, 5, 66)}, "H = 66 is no multiple of head_num 4"),
        ({"key": _r(2, 7, 40)}, "width 40 of key is no multiple of D = 16"),
        ({"value": _r(2, 7, 33)}, "width 33 of value has not 2 heads"),
    ):
        with pytest.raises(RefusedError, match=words):
            fake_npu.torch_npu.npu_fusion_attention(**{**call, **change})


def test_more_than_256_heads_are_refused(fake_npu):
    with pytest.raises(RefusedError, match="257 heads, supported are 1 to 256"):
        fake_npu.torch_npu.npu_fusion_attention(**_dense(heads=257, kv_heads=1, size=1))


def test_more_than_2048_packed_sequences_are_refused_as_documented(fake_npu):
    call = _packed((1,) * 2049, heads=1, kv_heads=1, size=1)
    with pytest.raises(RefusedError, match="2049 sequences, at most 2048"):
        fake_npu.torch_npu.npu_fusion_attention(**call)


def test_an_empty_row_is_refused(fake_npu):
    call = {**_packed(), "actual_seq_qlen": [0, 0], "actual_seq_kvlen": [4, 10]}
    with pytest.raises(RefusedError, match="length 0 of query"):
        fake_npu.torch_npu.npu_fusion_attention(**call)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pse": _r(2, 4), "pse_type": 2}, "pse_type 2 .* is not simulated"),
        ({"pse": _r(1, 4, 1024, 2048), "query": _r(2, 4, 2048, 16)}, "compressed pse for 2048 rows is not simulated"),
        ({"dropout_mask": _mask(1)}, "dropout_mask is not simulated"),
    ],
)
def test_what_is_not_simulated_says_so_and_is_no_refusal(fake_npu, change, words):
    call = {**_dense(columns=2048 if "query" in change else 7), **change}
    with pytest.raises(OpsError, match=words):
        fake_npu.torch_npu.npu_fusion_attention_v2(**call)


def test_pse_type_is_checked(fake_npu):
    with pytest.raises(RefusedError, match="pse_type 4 is outside 0 to 3"):
        fake_npu.torch_npu.npu_fusion_attention_v2(**_dense(), pse_type=4)


def test_separate_rotary_parts_go_together(fake_npu):
    with pytest.raises(RefusedError, match="query_rope and key_rope go together"):
        fake_npu.torch_npu.npu_fusion_attention_v2(**_dense(), query_rope=_r(2, 4, 5, 8))


def test_version_3_takes_lengths_as_integer_tensors(fake_npu):
    call = _packed()
    with pytest.raises(RefusedError, match="1-D integer tensor on the CPU"):
        fake_npu.torch_npu.npu_fusion_attention_v3(
            **{**call, "actual_seq_qlen": torch.tensor([4.0, 10.0]), "actual_seq_kvlen": torch.tensor([4, 10])}
        )


GRADIENT = {
    **_packed(),
    "dy": _r(10, 4, 16),
    "softmax_max": _r(10, 4, 8),
    "softmax_sum": _r(10, 4, 8) + 1,
    "attention_in": _r(10, 4, 16),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"softmax_in": _r(1)}, "softmax_in must be None"),
        ({"softmax_max": None}, "softmax_max is missing"),
        ({"attention_in": None}, "attention_in is missing"),
        ({"softmax_sum": _r(10, 4)}, r"softmax_sum must be float32 \[10, 4, 8\]"),
        ({"dy": _r(10, 4, 8)}, "dy .* and attention_in .* differ in shape"),
        ({"dy": _r(10, 4, 16, dtype=torch.bfloat16)}, "dy is torch.bfloat16"),
    ],
)
def test_the_gradient_wants_what_the_forward_saved(fake_npu, change, words):
    fake_npu.torch_npu.npu_fusion_attention_grad(**GRADIENT)
    with pytest.raises(RefusedError, match=words):
        fake_npu.torch_npu.npu_fusion_attention_grad(**{**GRADIENT, **change})
