# SPDX-License-Identifier: Apache-2.0
"""One token has one id in all parents, and one conversation one text."""

import copy
import json

import pytest

from mindvl_merge import DirectoryError
from mindvl_merge.tokenizers import tokenizer_differences

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 3, "content": "<|im_end|>", "special": True, "lstrip": False}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": None,
    "decoder": None,
    "post_processor": None,
    "model": {"type": "BPE", "byte_fallback": False, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


@pytest.fixture
def compare(tmp_path):
    """Differences of two directories with these files."""

    def found(first, other):
        for name, files in (("a", first), ("b", other)):
            for file, content in files.items():
                path = tmp_path / name / file
                path.parent.mkdir(exist_ok=True, parents=True)
                path.write_text(content if isinstance(content, str) else json.dumps(content))
        return tokenizer_differences(tmp_path / "a", tmp_path / "b")

    return found


def _changed(change):
    document = copy.deepcopy(TOKENIZER)
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda t: t["model"]["vocab"].update(a=1, b=0), "token 'a' and 1 more"),
        (lambda t: t["model"]["vocab"].update(c=4), "token 'c'"),
        (lambda t: t["added_tokens"][0].update(id=4), "token '<|im_end|>'"),
        (lambda t: t["added_tokens"][0].update(special=False), "added token '<|im_end|>'"),
        (lambda t: t["added_tokens"].clear(), "token '<|im_end|>'"),
        (lambda t: t["model"]["merges"].clear(), "model.merges"),
        (lambda t: t["model"].update(byte_fallback=True), "model.byte_fallback"),
        (lambda t: t.update(normalizer=None), "normalizer"),
    ],
)
def test_text_that_becomes_other_ids_is_refused(compare, change, key):
    (found,) = compare({"tokenizer.json": TOKENIZER}, {"tokenizer.json": _changed(change)})
    assert (found.key, found.is_refused) == (key, True)


def test_spelling_and_limits_do_not_matter(compare):
    def change(document):
        document["model"]["merges"] = [["a", "b"]]
        document["truncation"] = {"max_length": 5}

    assert compare({"tokenizer.json": TOKENIZER}, {"tokenizer.json": _changed(change)}) == []


def test_old_tokenizers_are_compared_as_files(compare):
    (found,) = compare({"vocab.json": {"a": 0}, "merges.txt": "x"}, {"vocab.json": {"a": 1}, "merges.txt": "x"})
    assert (found.file, found.is_refused) == ("vocab.json", True)


def test_a_model_without_tokenizer_is_a_warning(compare):
    (found,) = compare({"tokenizer.json": TOKENIZER}, {"config.json": "{}"})
    assert (found.key, found.other, found.is_refused) == ("tokenizer", "absent", False)


def test_other_special_tokens_are_warnings(compare):
    settings = {"eos_token": "<|im_end|>", "model_max_length": 5}
    found = compare({"tokenizer_config.json": settings}, {"tokenizer_config.json": settings | {"eos_token": "b"}})
    assert [(one.key, one.other, one.is_refused) for one in found] == [("eos_token", "'b'", False)]


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ({"chat_template.jinja": "x\n"}, {"tokenizer_config.json": {"chat_template": "x"}}, []),
        ({"chat_template.jinja": "x"}, {"chat_template.json": {"chat_template": "y"}}, [("chat_template", True)]),
        ({"chat_template.jinja": "x"}, {"a.txt": ""}, [("chat_template", False)]),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "x"}]}},
            {"chat_template.jinja": "x", "additional_chat_templates/tool.jinja": "y"},
            [("chat_template 'tool'", True)],
        ),
        (
            {"tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "x"},
            {"chat_template.jinja": "x"},
            [],
        ),
    ],
)
def test_templates_are_compared_wherever_they_are_kept(compare, first, other, expected):
    assert [(one.key, one.is_refused) for one in compare(first, other)] == expected


@pytest.mark.parametrize(
    "document",
    [
        {"model": []},
        {"model": {"vocab": 5}},
        {"model": {"vocab": {}}, "added_tokens": [1]},
        {"model": {"vocab": [[1]]}},
    ],
)
def test_what_is_no_tokenizer_is_named(compare, document):
    with pytest.raises(DirectoryError, match=r"b.tokenizer\.json: "):
        compare({"tokenizer.json": TOKENIZER}, {"tokenizer.json": document})


def test_a_tokenizer_saved_again_by_another_version_does_not_differ(tmp_path):
    """Newer versions of the tokenizers library write more defaults; trim_offsets changes no token."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    documents = {
        "old": {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [level]}},
        "new": {
            "model": model | {"ignore_merges": False, "byte_fallback": False, "dropout": None},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [level | {"trim_offsets": True, "use_regex": True}],
            },
        },
        "other": {
            "model": model,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [level | {"use_regex": False}]},
        },
    }
    for name, document in documents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(document))
    assert tokenizer_differences(tmp_path / "old", tmp_path / "new") == []
    (found,) = tokenizer_differences(tmp_path / "old", tmp_path / "other")
    assert (found.key, found.first, found.other) == ("pre_tokenizer", "True", "absent")
