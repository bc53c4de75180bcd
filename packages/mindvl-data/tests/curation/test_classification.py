# SPDX-License-Identifier: Apache-2.0
"""Classes of records, by phrases, a local model and an endpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from mindvl_data.curation.classification import (
    OTHER,
    TAXONOMY,
    Classify,
    EndpointClassifier,
    KeywordClassifier,
    ModelClassifier,
    classify,
    modality,
    most_phrases,
    read_rules,
)
from mindvl_data.curation.endpoint import EndpointConfig
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, find_step
from mindvl_data.errors import DataError, SampleError


def _record(number: int, question: Any, answer: str = "Yes.") -> Record:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Record(number=number, id=str(number), body={"messages": messages})


def _capabilities(outcomes: Any) -> list[str]:
    return [outcome.facts["capability"] for outcome in outcomes]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.json"
    chinese = "\u8bfb\u51fa"  # read out
    path.write_text(json.dumps({"math": ["triangle", "solve"], "ocr": ["read the text", "OCR", chinese]}))
    return path


def test_the_capability_with_the_most_phrases_is_chosen(rules: Path, context: Context) -> None:
    records = [
        _record(0, "Please READ THE TEXT."),
        _record(1, "Solve the triangle; read the text."),
        _record(2, "Solve; ocr."),  # one each: the earlier in the taxonomy
        _record(3, "Resolve the rectangles."),  # parts of words do not count
        _record(4, "\u8bf7\u8bfb\u51fa\u6587\u5b57"),  # in a Chinese sentence
    ]
    config = Classify(classifier=KeywordClassifier(rules=rules))
    assert _capabilities(classify(records, config, context)) == ["ocr", "math", "ocr", "other", "ocr"]


def test_two_steps_with_the_same_rules_keep_the_order_of_their_own_taxonomies(rules: Path, context: Context) -> None:
    tie = [_record(0, "Solve; ocr.")]
    found = []
    for taxonomy in (TAXONOMY, dict(reversed(TAXONOMY.items()))):
        config = Classify(classifier=KeywordClassifier(rules=rules), taxonomy=taxonomy)
        found += _capabilities(classify(tie, config, context))
    assert len(set(found)) == 2


def test_overlapping_phrases_count_once(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"ocr": ["text", "read the text", "the text"], "math": ["sum", "add"]}))
    rules = read_rules(path, TAXONOMY)
    assert most_phrases("read the text", rules) == "ocr"
    assert most_phrases("read the text and add the sum", rules) == "math"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"cooking": ["soup"]}', "'cooking' is not in the taxonomy"),
        ('{"ocr": "read"}', "expected an object"),
        ('{"ocr": [" "]}', "expected an object"),
    ],
)
def test_wrong_rules_are_refused_before_the_run(content: str, message: str, tmp_path: Path, context: Context) -> None:
    path = tmp_path / "rules.json"
    path.write_text(content)
    prepare = find_step("classify").prepare
    assert prepare is not None
    with pytest.raises(DataError, match=message):
        prepare(Classify(classifier=KeywordClassifier(rules=path)), context)


def test_the_modality_is_that_of_the_placeholders() -> None:
    image, video = {"type": "image"}, {"type": "video"}
    assert modality(_record(0, "x")) == "text"
    assert modality(_record(0, [image, "x"])) == "image"
    assert modality(_record(0, [image, "x", image])) == "multi_image"
    assert modality(_record(0, [image, video])) == "video"
    assert modality(Record(number=0, id="", body={"content": [image, "x"]})) == "image"


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A BERT that knows the words "solve" (label A) and "read" (label B) only: its classifier reads their embeddings."""
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "solve": 2, "read": 3}
    backend = Backend(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=4, hidden_size=8, num_hidden_layers=0, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16, id2label={0: "A", 1: "B"}, label2id={"A": 0, "B": 1},
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        embeddings = model.bert.embeddings
        for table in (embeddings.position_embeddings, embeddings.token_type_embeddings, embeddings.word_embeddings):
            table.weight.zero_()
        embeddings.word_embeddings.weight[2, 0] = embeddings.word_embeddings.weight[3, 1] = 9.0
        model.bert.pooler.dense.weight.copy_(torch.eye(8))
        model.bert.pooler.dense.bias.zero_()
        model.classifier.weight.copy_(torch.eye(2, 8))
        model.classifier.bias.zero_()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_local_model_classifies_by_its_labels(model_directory: Path, context: Context) -> None:
    labels = {"A": "math", "B": "ocr"}
    records = [_record(0, "solve"), _record(1, "read"), _record(2, "dance")]
    config = Classify(classifier=ModelClassifier(directory=model_directory, labels=labels, min_score=0.6))
    # the third text has equal scores, 0.5 each, below min_score
    assert _capabilities(classify(records, config, context)) == ["math", "ocr", "other"]
    assert _capabilities(classify(records[1:2], config, context)) == ["ocr"]
    with pytest.raises(DataError, match="label 'B' is not in the taxonomy"):
        classify(
            records, Classify(classifier=ModelClassifier(directory=model_directory, labels={"A": "math"})), context
        )
    with pytest.raises(DataError, match="cannot be loaded"):
        classify(records, Classify(classifier=ModelClassifier(directory=model_directory / "x", labels=labels)), context)


def test_an_endpoint_names_one_capability_or_the_record_fails(chat_server: Any, context: Context) -> None:
    chat_server.answer = lambda body: "Table_chart" if "chart" in body["messages"][0]["content"][:40] else "I think ocr"
    classifier = EndpointClassifier(endpoint=EndpointConfig(url=chat_server.url, model="m"))
    (found,) = classify([_record(0, "A chart?")], Classify(classifier=classifier), context)
    assert isinstance(found, Record)
    assert found.facts["capability"] == "table_chart"
    prompt = chat_server.requests[0]["messages"][0]["content"]
    assert prompt.startswith("[user]\nA chart?\n[assistant]\nYes.\n")
    assert all(f"- {name}: {description}" in prompt for name, description in TAXONOMY.items())
    with pytest.raises(SampleError, match="none of caption, ocr"):
        classify([_record(1, "What?")], Classify(classifier=classifier), context)


def test_the_groups_of_the_paper_are_capabilities() -> None:
    # appendix C.2, and the categories of Table 11
    groups = {"video", "caption", "ocr", "gui", "math", "knowledge", "grounding", "general_vqa", "stem", "table_chart"}
    assert groups <= TAXONOMY.keys()
    assert OTHER not in TAXONOMY
