# SPDX-License-Identifier: Apache-2.0
"""Images are read once, again if they change, and errors name the file; real images are tested in mindvl_cli."""

import hashlib
import os

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import EmbeddedImage
from mindvl_merge.evaluation.images import image_hash, image_size, open_image


class LastByteDecoder:
    """An image file is 28 pixels high and as many pixels wide as its last byte says."""

    def __init__(self):
        self.num_reads = 0

    def read_size(self, content):
        if not content:
            raise EvaluationError("image is empty")
        self.num_reads += 1
        return 28, content[-1]

    decode = read_size


def test_a_size_is_read_once_and_again_after_the_file_changed(tmp_path):
    path, decoder = tmp_path / "a.png", LastByteDecoder()
    path.write_bytes(b"\x05")
    assert [image_size(path, decoder) for _ in range(2)] == [(28, 5), (28, 5)]
    assert decoder.num_reads == 1
    path.write_bytes(b"\x07")
    os.utime(path, ns=(1, 1))
    assert image_size(path, decoder) == (28, 7)
    assert (
        image_hash(path) == image_hash(EmbeddedImage(name="x", content=b"\x07")) == hashlib.sha256(b"\x07").hexdigest()
    )


def test_a_damaged_image_is_named_with_the_remedy(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(EvaluationError, match=r"empty\.png: image is empty\. Replace the file"):
        open_image(tmp_path / "empty.png", LastByteDecoder())
    with pytest.raises(EvaluationError, match=r"none\.png: the image cannot be read"):
        image_size(tmp_path / "none.png", LastByteDecoder())
