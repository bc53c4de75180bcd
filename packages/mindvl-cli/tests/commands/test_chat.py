# SPDX-License-Identifier: Apache-2.0
"""`mindvl chat` answers as `mindvl eval` does, keeps the turns, and streams."""

import click
import pytest
from click.testing import CliRunner
from PIL import Image

from mindvl_cli.commands.chat import chat, talk
from mindvl_cli.predictor import make_predictor
from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import Conversation, Item, PredictConfig
from mindvl_merge.evaluation.conversation import Generation

SHORT = ["--trust-remote-code", "--device", "cpu", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def predictor(model_directory):
    """A predictor with the tiny model."""
    config = PredictConfig(device="cpu", max_new_tokens=6)
    return make_predictor(model_directory, config=config, cache=None, trust_remote_code=True)


@pytest.fixture
def image(tmp_path):
    """An image of 112 x 112 pixels: 16 visual tokens."""
    path = tmp_path / "image.png"
    Image.effect_noise((112, 112), 80).save(path)
    return path


def _predicted(predictor, question, images):
    item = Item(id="1", task="t", images=images, question=question, answer="")
    (prediction,) = predictor.predict(predictor.questions([item], min_pixels=None, max_pixels=None))
    return prediction.answer


def test_one_question_has_the_answer_of_the_evaluation(model_directory, predictor, image):
    arguments = [str(model_directory), *SHORT, "--image", str(image), "--prompt", "read the number"]
    result = CliRunner().invoke(chat, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    expected = _predicted(predictor, "<image>read the number", (image,))
    assert expected
    assert result.stdout.strip() == expected


def test_lines_of_a_pipe_are_questions_and_commands(model_directory, predictor, image):
    lines = f"read the number\n\n/clear\n/image {image}\nread\n/exit\nnever asked\n"
    result = CliRunner().invoke(chat, [str(model_directory), *SHORT], input=lines, catch_exceptions=False)
    answers = [_predicted(predictor, "read the number", ()), _predicted(predictor, "<image>read", (image,))]
    assert result.stdout.split() == " ".join(answers).split()


def test_a_wrong_command_or_image_ends_a_pipe_with_the_reason(model_directory):
    for line, reason in (("/imagine x", "/imagine: is not a command"), ("/image none.png", "'none.png' is not a file")):
        result = CliRunner().invoke(chat, [str(model_directory), *SHORT], input=f"{line}\n")
        assert result.exit_code == 1
        assert reason in str(result.exception)


def test_the_second_question_is_answered_with_the_first_turn_and_its_image_in_the_prompt(predictor, image):
    conversation = Conversation(predictor)
    first = "".join(conversation.ask("read", [image])).strip()
    inputs = []
    encode = predictor.encode
    try:
        predictor.encode = lambda texts, batch: inputs.append((texts, batch)) or encode(texts, batch)
        list(conversation.ask("again"))
    finally:
        del predictor.encode
    ((prompt,), (question,)) = inputs[0]
    assert question.item.images == (image,)
    turns = [("user", "<|vision_start|><|image_pad|><|vision_end|>read"), ("assistant", first), ("user", "again")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert prompt.endswith(expected + "<|im_start|>assistant\n")
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"] * 2


def test_an_answer_that_is_stopped_stays_in_the_conversation_as_far_as_it_was_shown(predictor):
    conversation = Conversation(predictor)
    pieces = conversation.ask("read the number 0123456789")
    shown = next(pieces)
    pieces.close()
    assert conversation.turns[-1] == {"role": "assistant", "content": shown.strip()}


@pytest.mark.parametrize(("stop_after", "num_steps"), [(None, 6), (2, 2)])
def test_generation_ends_after_the_token_at_which_it_is_stopped(predictor, stop_after, num_steps):
    inputs = predictor.encode(["read the number"], predictor.questions([], min_pixels=None, max_pixels=None))
    generation = Generation(predictor, inputs, 0.0)
    steps = []

    def count(*_):
        steps.append(1)
        if len(steps) == stop_after:
            generation.request_stop()

    handle = predictor.model.register_forward_hook(count)
    try:
        list(generation.pieces())
    finally:
        handle.remove()
    assert len(steps) == num_steps


def test_ctrl_c_on_a_terminal_ends_the_answer_and_not_the_conversation(predictor, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    lines = iter(["read", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(click, "echo", interrupted_once(click.echo))
    conversation = Conversation(predictor)
    talk(conversation, (), is_terminal=True)
    assert "(stopped)" in capsys.readouterr().err
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"]


def interrupted_once(echo):
    """`click.echo` that is interrupted while it prints the first piece of an answer."""
    calls = []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        echo(*arguments, **options)

    return interrupted


def test_a_conversation_beyond_the_positions_of_the_model_is_refused(predictor):
    conversation = Conversation(predictor)
    with pytest.raises(EvaluationError, match="exceed the 512 positions"):
        list(conversation.ask("0" * 600))
    assert conversation.turns == []
