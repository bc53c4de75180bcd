# SPDX-License-Identifier: Apache-2.0
"""A conversation keeps what was asked and answered; real models are tested in mindvl_cli."""

from types import SimpleNamespace

import pytest
import torch

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import Conversation, PredictConfig, Predictor


class Words:
    """Token id N is the word "wN"."""

    eos_token_id = pad_token_id = 0

    def decode(self, ids, **_):
        return "".join(f"w{int(token)} " for token in ids)


class Inputs(dict):
    """Model inputs of five prompt tokens."""

    def to(self, device):
        return self


class Model:
    """Answers with three words unless it is stopped, or raises `error`."""

    error = None

    def __init__(self):
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=80))

    def generate(self, *, input_ids, generation_config, streamer, stopping_criteria):
        streamer.put(input_ids)
        for token in (1, 2, 3):
            if self.error:
                raise self.error
            streamer.put(torch.tensor([token]))
            if stopping_criteria[0](input_ids, None).all():
                break
        streamer.end()


@pytest.fixture
def predictor(tmp_path):
    """A predictor of text with the model above; its prompts are the contents of all turns."""
    (tmp_path / "config.json").write_text("{}")
    predictor = Predictor(tmp_path, decoder=None, load=None, config=PredictConfig(device="cpu", max_new_tokens=64))
    prompts = []

    def template(turns, **_):
        prompts.append([turn["content"] for turn in turns])
        return ""

    predictor.__dict__.update(
        processor=SimpleNamespace(apply_chat_template=template), model=Model(), tokenizer=Words(), prompts=prompts
    )
    predictor.encode = lambda texts, batch: Inputs(input_ids=torch.zeros(1, 5, dtype=torch.long))
    return predictor


def test_the_next_prompt_has_all_turns_until_they_are_cleared(predictor):
    conversation = Conversation(predictor)
    assert "".join(conversation.ask("a")).split() == ["w1", "w2", "w3"]
    list(conversation.ask("b"))
    conversation.clear()
    list(conversation.ask("c"))
    assert predictor.prompts == [["a"], ["a", "w1 w2 w3", "b"], ["c"]]


def test_an_error_during_generation_reaches_the_caller_and_the_turn_is_dropped(predictor):
    conversation = Conversation(predictor)
    predictor.model.error = torch.OutOfMemoryError("no memory left")
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        list(conversation.ask("read"))
    assert conversation.turns == []


def test_a_conversation_that_leaves_no_room_for_the_answer_is_refused(predictor):
    conversation = Conversation(predictor)
    predictor.encode = lambda texts, batch: Inputs(input_ids=torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(EvaluationError, match="17 tokens and an answer of 64 exceed the 80 positions"):
        list(conversation.ask("read"))
    assert conversation.turns == []


def test_placeholders_without_images_and_images_of_a_text_model_are_refused(predictor, tmp_path):
    with pytest.raises(EvaluationError, match="1 <image> placeholders for 0 images"):
        list(Conversation(predictor).ask("what is <image>?"))
    with pytest.raises(EvaluationError, match="has no image processor"):
        list(Conversation(predictor).ask("what is it?", [tmp_path / "a.png"]))
