# SPDX-License-Identifier: Apache-2.0
"""Marks in conversations."""

from mindvl_data.formats.turns import messages_of_turns, parts_of_text


def test_placeholders_become_parts_and_all_else_stays() -> None:
    assert parts_of_text("", {}) == [{"type": "text", "text": ""}]
    assert parts_of_text("a<video><box:0>", {"boxes": [[1, 2, 3, 4]]}) == [
        {"type": "text", "text": "a"},
        {"type": "video"},
        {"type": "box", "image": 0, "xyxy": [1, 2, 3, 4]},
    ]


def test_without_a_row_there_are_no_coordinates_to_refer_to() -> None:
    assert parts_of_text("<box:0><image>", None) == [{"type": "text", "text": "<box:0>"}, {"type": "image"}]


def test_roles_have_the_names_of_both_worlds() -> None:
    turns = [{"from": "system", "value": "s"}, {"role": "user", "content": "u"}, {"from": "gpt", "value": "g"}]
    assert [message["role"] for message in messages_of_turns(turns, {})] == ["system", "user", "assistant"]
