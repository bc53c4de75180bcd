# SPDX-License-Identifier: Apache-2.0
"""Perceptual duplicates against all pairs, and the hashes against the imagehash library."""

import io
from itertools import combinations
from typing import Any

import imagehash
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mindvl_data.curation.duplicates import perceptual
from mindvl_data.curation.duplicates.perceptual import (
    STEP,
    ImageDuplicates,
    best_num_blocks,
    block_masks,
    image_hash,
)
from mindvl_data.curation.record import Record


def _photo(seed: int, size: int = 96) -> Image.Image:
    """Smooth random shapes, which have distinct low frequencies."""
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _record(number: int, *images: Image.Image, text: str = "") -> Record:
    media = tuple(_png(image) for image in images)
    return Record(number=number, id=str(number), body={"content": text}, media=media)


@pytest.mark.parametrize("method", ["phash", "dhash"])
def test_a_hash_is_that_of_imagehash(method: str) -> None:
    photo = _photo(1)
    assert f"{image_hash(np.asarray(photo), method):016x}" == str(getattr(imagehash, method)(photo))


@pytest.mark.parametrize(("num_blocks", "radius"), [(1, 0), (3, 2), (6, 4), (7, 3)])
def test_every_hash_within_the_radius_agrees_on_the_bits_of_a_mask(num_blocks: int, radius: int) -> None:
    masks = list(block_masks(num_blocks, radius))
    generator = np.random.default_rng(2)
    for _ in range(200):
        different = sum(1 << int(bit) for bit in generator.choice(64, radius, replace=False))
        assert any(different & mask == 0 for mask in masks)


def test_more_rows_take_more_blocks() -> None:
    # Sorts and pairs in microseconds per row, for a million: 5 * (0.5 + 2.4) with 5 blocks of 12 equal bits,
    # 15 * (0.5 + 0.005) with 6 of 21, 35 * 0.5 with 7 of 27.
    assert [best_num_blocks(num_rows, 4) for num_rows in (100, 10**6, 10**9)] == [5, 6, 7]


HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4).flatmap(
    lambda centers: st.lists(
        st.tuples(st.sampled_from(centers), st.sets(st.integers(0, 63), max_size=4)), min_size=1, max_size=25
    )
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
@given(near=HASHES, radius=st.integers(0, 5), in_pairs=st.booleans())
def test_groups_are_those_of_all_pairs(
    near: list[tuple[int, set[int]]], radius: int, in_pairs: bool, decide: Any
) -> None:
    hashes = [center ^ sum(1 << bit for bit in bits) for center, bits in near]
    images = [hashes[i : i + 1 + in_pairs] for i in range(0, len(hashes), 1 + in_pairs)]
    records = [Record(number=i, id="", body={}, media=(b"",) * len(part)) for i, part in enumerate(images)]
    names = list(range(len(records)))
    for i, j in combinations(range(len(records)), 2):
        same = len(images[i]) == len(images[j])
        if same and all((a ^ b).bit_count() <= radius for a, b in zip(images[i], images[j], strict=True)):
            low, high = sorted((names[i], names[j]))
            names = [low if name == high else name for name in names]
    with pytest.MonkeyPatch.context() as patch:
        flat = iter([value for part in images for value in part])
        patch.setattr(Record, "image", lambda self, index=0: None)
        patch.setattr(perceptual, "image_hash", lambda pixels, method: next(flat))
        found = decide(STEP, ImageDuplicates(radius=radius), records)
    kept = {number: f"same as 0:{name}" for number, name in enumerate(names) if name != number}
    assert {number: d.drop.value for number, d in found.items() if d.drop} == kept


def test_resized_and_recompressed_images_are_found_and_others_are_kept(decide: Any) -> None:
    photo, buffer = _photo(1), io.BytesIO()
    photo.save(buffer, "JPEG", quality=40)
    records = [
        _record(0, _photo(1)),
        _record(1, _photo(2)),
        _record(2, _photo(1).resize((50, 61))),
        _record(3, Image.open(buffer)),
        _record(4, _photo(1), _photo(2)),
        _record(5, _photo(1).resize((70, 70)), _photo(2)),
        _record(6, _photo(1), _photo(3)),
    ]
    found = decide(STEP, ImageDuplicates(), records)
    drops = {number: d.drop.value for number, d in found.items() if d.drop}
    assert drops == {2: "same as 0:0", 3: "same as 0:0", 5: "same as 0:4"}


def test_nearly_empty_images_have_no_hash() -> None:
    page = np.full((64, 64, 3), 255, np.uint8)
    page[:2] = 250
    assert image_hash(page, "phash") is None
    page[:32] = 0
    assert image_hash(page, "phash") is not None


def test_nearly_empty_images_are_not_compared(decide: Any) -> None:
    empty = Image.new("RGB", (50, 50), (9, 9, 9))
    records = [_record(0, empty), _record(1, empty), _record(2, _photo(1), empty), _record(3, _photo(1), empty)]
    assert decide(STEP, ImageDuplicates(), records) == {}


def test_the_text_may_have_to_be_equal(decide: Any) -> None:
    records = [_record(number, _photo(1), text=text) for number, text in enumerate(["how many?", "what?", "What?"])]
    found = decide(STEP, ImageDuplicates(same_text=True), records)
    assert {number: d.drop.value for number, d in found.items() if d.drop} == {2: "same as 0:1"}


def test_the_radius_is_bounded() -> None:
    with pytest.raises(ValueError, match="radius: must be from 0 to 16, got 17"):
        ImageDuplicates(radius=17)
