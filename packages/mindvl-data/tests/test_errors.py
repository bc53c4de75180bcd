# SPDX-License-Identifier: Apache-2.0
"""Secrets in addresses and settings never become part of a message."""

import pytest

from mindvl_data import DataError, SampleError, redact

SECRET = "hV5bPOw0rd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"s3://me:{SECRET}@bucket/a.tar is missing", "s3://***@bucket/a.tar is missing"),
        (f"https://{SECRET}@host:8080/x@y/a.tar", "https://***@host:8080/x@y/a.tar"),
        (f"https://me:{SECRET}@{SECRET}@host/a.tar", "https://***@host/a.tar"),
        (f"https://me:{SECRET}/{SECRET}@host/a.tar", "https://***@host/a.tar"),
        (f"pipe:curl ftp://me:{SECRET}@h/a 'http://u:{SECRET}@h/b'", "pipe:curl ftp://***@h/a 'http://***@h/b'"),
        (f"https://h/a.tar?v=1&token={SECRET}&w=2: gone", "https://h/a.tar?v=1&token=***&w=2: gone"),
        (f"https://h/a?X-Amz-Credential={SECRET}%2Fx&X-Amz-Signature={SECRET}", None),
        (f"https://h/a?sv=1&sig={SECRET}%3D. Copy it again.", "https://h/a?sv=1&sig=***. Copy it again."),
        (f"https://h/a?AWSAccessKeyId={SECRET}&Signature={SECRET}&Expires=17", None),
        (f"/bucket/a.tar?X-Amz-Security-Token={SECRET}", "/bucket/a.tar?X-Amz-Security-Token=***"),
        ("options: {'key': 'me', 'secret': '" + SECRET + "', 'endpoint_url': 'http://h'}", None),
        (f"aws_secret_access_key={SECRET}, region=x", "aws_secret_access_key=***, region=x"),
        (f"Authorization: Bearer {SECRET}{SECRET}", "Authorization: Bearer ***"),
        ("AKIAABCDEFGHIJKLMNOP and hf_abcdefghijklmnopqrstuv", "*** and ***"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str | None) -> None:
    assert SECRET not in redact(text)
    assert shown is None or redact(text) == shown
    for error in (DataError(text), SampleError(text)):
        assert str(error) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b.tar: 24 of 36 samples are missing. Index it again.",
        "https://host:8080/photos/x@y.tar?version=3",
        "packing.seq_length=256, keys: 'a', token 151655, image_token=5, max_failed_share=0.01",
        "shard-000003.tar:key: text mentions 2 images, but the sample has 1",
        "tokenizer: special tokens differ (basic settings). user@host accepted it.",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_long_text_takes_no_time_to_speak_of() -> None:
    for text in (
        "://" * 30_000,
        "a:" * 100_000 + "@",
        "?key=" * 30_000,
        "://a:b" * 20_000,
        "bearer " * 30_000,
        "?key" * 50_000,
    ):
        assert len(redact(text)) > 0
