# SPDX-License-Identifier: Apache-2.0
"""Headers of images: what decoding will take, and how an image is turned."""

import io
from typing import Any

import pytest
from PIL import Image

from mindvl_data import SampleError
from mindvl_data.image_files import check_memory, open_image, orientation, read_jpeg_header


def encoded(format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(options.pop("mode", "RGB"), (64, 48)).save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("options", "bytes_kept"),
    [
        ({}, 0.0),
        ({"progressive": True, "subsampling": 0}, 6.0),  # three samples of two bytes
        ({"progressive": True, "subsampling": 2}, 3.0),  # a whole one, and two of a quarter
        ({"progressive": True, "mode": "L"}, 2.0),
        ({"progressive": True, "mode": "CMYK"}, 8.0),
    ],
)
def test_a_progressive_jpeg_keeps_two_bytes_for_each_sample(options: dict[str, Any], bytes_kept: float) -> None:
    content = encoded("JPEG", **options)
    header = read_jpeg_header(content)
    assert header.coefficient_bytes == bytes_kept
    assert content[header.first_scan : header.first_scan + 2] == b"\xff\xda"


def test_a_jpeg_whose_scans_hold_one_component_each_keeps_its_samples_too() -> None:
    content = bytearray(encoded("JPEG", subsampling=0))
    content[read_jpeg_header(bytes(content)).first_scan + 4] = 1
    assert read_jpeg_header(bytes(content)).coefficient_bytes == 6.0


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xc0\0\x03\x08", b"\xff\xd8\xff\xe1\0\0" * 9])
def test_a_damaged_jpeg_header_ends(content: bytes) -> None:
    assert read_jpeg_header(content).first_scan == len(content)


def test_the_limit_counts_pixels_and_bytes() -> None:
    check_memory(100, 100, 5.0, 10_000)
    with pytest.raises(SampleError, match="101x100 pixels is larger than the decode limit of 10000 pixels"):
        check_memory(101, 100, 1.0, 10_000)
    with pytest.raises(SampleError, match=r"takes 51 MB to decode, .* allows 50 MB"):
        check_memory(1000, 10_000, 5.1, 10_000_000)


@pytest.mark.parametrize("value", [0, 9, 65_535])
def test_an_orientation_that_does_not_exist_turns_nothing(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    content = encoded("JPEG", exif=exif)
    assert orientation(open_image(content, 10**6), content) == 1


def test_orientation_in_xmp_counts_where_exif_has_none() -> None:
    content = encoded("JPEG", xmp=b'<x tiff:Orientation="6"/>')
    assert orientation(open_image(content, 10**6), content) == 6
