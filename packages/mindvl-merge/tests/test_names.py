# SPDX-License-Identifier: Apache-2.0
"""Names of one tensor in published directories, in those of newer transformers, and in language models alone."""

import pytest

from mindvl_merge.names import canonical_name, matches, part_of


@pytest.mark.parametrize(
    ("name", "canonical", "part"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight", "language"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight", "language"),
        ("language_model.model.norm.weight", "model.norm.weight", "language"),
        ("language_model.lm_head.weight", "lm_head.weight", "language"),
        ("lm_head.weight", "lm_head.weight", "language"),
        ("visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight", "vision"),
        ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight", "vision"),
        ("model.visual.merger.mlp.0.weight", "visual.merger.mlp.0.weight", "projector"),
        ("model.multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight", "projector"),
        ("vision_tower.encoder.weight", "vision_tower.encoder.weight", "vision"),
        ("something.else", "something.else", None),
    ],
)
def test_names_of_the_families(name, canonical, part):
    assert (canonical_name(name), part_of(name)) == (canonical, part)
    assert canonical_name(canonical) == canonical


def test_patterns_select_parts_prefixes_and_wildcards():
    name = "model.visual.blocks.3.attn.qkv.weight"
    selected = [
        p for p in ("vision", "projector", "model.visual.", "*.attn.*", "blocks", "*.mlp.*") if matches(name, p)
    ]
    assert selected == ["vision", "model.visual.", "*.attn.*"]
