# SPDX-License-Identifier: Apache-2.0
"""The command line in the manifest has every setting that is not a default."""

import shlex
from pathlib import Path

from mindvl_merge import MergeConfig
from mindvl_merge.manifest import command

PATHS = (Path("a b"), Path("c"))


def test_defaults_are_left_out():
    assert command(MergeConfig(models=PATHS, out=Path("out"))) == "mindvl merge 'a b' c --out out"


def test_every_setting_is_an_option():
    config = MergeConfig(
        models=PATHS,
        out=Path("out"),
        method="dare_ties",
        base=Path("base"),
        weights=(0.5, 2.0),
        part_weights={"*.mlp.*": (1.0, 0.1)},
        scale=0.7,
        density=0.2,
        seed=3,
        only=("language", "visual."),
        allow_missing=("model.layers.61.",),
        allow_different=("rope_theta",),
        match_tokens=True,
        any_weight_sum=True,
        dtype="bf16",
    )
    assert shlex.split(command(config))[6:] == [
        *("--method", "dare_ties", "--base", "base", "--dtype", "bf16", "--scale", "0.7", "--density", "0.2"),
        *(
            "--seed",
            "3",
            "--weights",
            "0.5,2.0",
            "--weights",
            "*.mlp.*=1.0,0.1",
            "--only",
            "language",
            "--only",
            "visual.",
        ),
        *(
            "--allow-missing",
            "model.layers.61.",
            "--allow-different",
            "rope_theta",
            "--match-tokens",
            "--any-weight-sum",
        ),
    ]
