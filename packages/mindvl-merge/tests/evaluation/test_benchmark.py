# SPDX-License-Identifier: Apache-2.0
"""Embedded images are named by their place and equal by their content."""

from mindvl_merge.evaluation import EmbeddedImage


def test_an_embedded_image_is_shown_as_its_place_and_never_as_its_bytes():
    image = EmbeddedImage(name="a.tsv:3: image 1", content=b"\x89PNG" * 1000)
    assert str(image) == "a.tsv:3: image 1"
    assert len(repr(image)) < 100
    assert image.read_bytes() == image.content
    assert image == EmbeddedImage(name="a.tsv:3: image 1", content=b"\x89PNG" * 1000)
    assert image != EmbeddedImage(name="a.tsv:3: image 1", content=b"other")
