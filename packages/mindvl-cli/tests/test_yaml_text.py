# SPDX-License-Identifier: Apache-2.0
"""Tests of YAML as people mean it."""

import math

import pytest
import yaml

from mindvl_cli.yaml_text import DuplicateKeyError, parse_document, parse_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5E3", 1500.0),
        (".5", 0.5),
        ("-3", -3),
        ("100_000", 100000),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("~", None),
        ("", None),
        ("0123", 123.0),
        ("'3'", "3"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_plain_values_follow_the_core_schema(text: str, value: object) -> None:
    parsed = parse_scalar(text)

    assert parsed == value
    assert type(parsed) is type(value)


def test_infinity_and_not_a_number_are_floats() -> None:
    assert parse_scalar("-.inf") == -math.inf
    assert math.isnan(parse_scalar(".nan"))


def test_every_key_and_entry_knows_its_line() -> None:
    _, lines = parse_document("a: 1\nb:\n  - c: 2\n  - 3\n")

    assert lines == {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 0, "c"): 3, ("b", 1): 4}


def test_an_empty_document_is_an_empty_mapping() -> None:
    assert parse_document("# nothing\n") == ({}, {})


def test_a_duplicate_key_names_both_lines() -> None:
    with pytest.raises(DuplicateKeyError, match="lines 2 and 4"):
        parse_document("a:\n  b: 1\n  c: 2\n  b: 3\n")


def test_two_documents_in_one_file_are_refused() -> None:
    with pytest.raises(yaml.YAMLError):
        parse_document("a: 1\n---\nb: 2\n")


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 100,000 keys and list entries"),
        ("&a [*a]", "contains itself"),
        ("a: &a\n  b: *a\n", "contains itself"),
        ("[" * 5000, "levels of nesting"),
        ("[" * 100 + "]" * 100, "levels of nesting"),
        (f"a: {'9' * 5000}", "a number of 5,000 digits"),
        (f"a: {'9' * 5000}.0", "a number of 5,002 digits"),
        ("a: !!binary aGVsbG8=", "binary"),
        ("a: !!timestamp 2024-01-01", "timestamp"),
        ("!!set {a, b}", "set"),
        ("a: !!python/object/apply:os.system [true]", "python"),
        ("a: !!int x", "does not fit its tag"),
        ("a: !!bool 3", "does not fit its tag"),
        ("a: !!float ''", "does not fit its tag"),
        (f"{BOMB}? *i\n: 1\n", "more than 100,000 keys"),
        ("b: &b [1]\n? *b\n: 1\n", "a key that is a list"),
        ("a: 1\n" * 700_000, "characters are more than"),
    ],
)
def test_what_would_cost_without_end_is_refused(text: str, message: str) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        parse_document(text)

    assert message in str(caught.value)


def test_an_alias_stands_for_what_it_names() -> None:
    assert parse_document("a: &a {b: [1]}\nc: *a\n")[0] == {"a": {"b": [1]}, "c": {"b": [1]}}
