# SPDX-License-Identifier: Apache-2.0
"""Metrics by hand: every rule, and what each project does at the odd cases."""

import subprocess
import sys
import time

import pytest

from mindvl_merge.errors import EvaluationError, RequestRefusedError
from mindvl_merge.evaluation import METRICS, find_metric, score
from mindvl_merge.evaluation.metrics.exam import _instruction
from mindvl_merge.evaluation.metrics.judged import Judgement, ask, judge_item, read_grade, read_verdict

ANIMALS = {"A": "cat", "B": "dog", "C": "bird", "D": "red car"}
FORMULA = {"category": "Handwritten Mathematical Expression Recognition"}
FLOAT = {"question_type": "free_form", "answer_type": "float"}
INTEGER = {"question_type": "free_form", "answer_type": "integer"}
OPTION = {"question_type": "multi_choice", "choices": ["4", "9", "12"]}

# metric, prediction, references, options, score as VLMEvalKit, lmms-eval and strict
CASES = [
    # edit distance 2 of 5 letters; 3 of 5 falls below the threshold; two cases and blanks are equal
    ("anls", "Parks", "Paris", {}, 0.8, 0.8, 0.8),
    ("anls", "Pa", "Paris", {}, 0.0, 0.0, 0.0),
    ("docvqa", "  PARIS\n", ["Lyon", "paris"], {}, 1.0, 1.0, 1.0),
    ("anls", "ab", "ac", {}, 0.5, 0.5, 0.5),  # the threshold itself counts
    ("anls", "", "", {}, 1.0, 1.0, 1.0),
    ("anls", "Pans", "Paris", {"threshold": 0.9}, 0.0, 0.0, 0.0),
    # five edits over the 105 characters before white space is removed
    ("anls", "wrong" + " " * 20, "Paris", {}, 0.8, 0.8, 0.0),  # five edits over 25 characters
    ("anls", "wrong" + " " * 100, "Paris", {}, 1 - 5 / 105, 1 - 5 / 105, 0.0),
    # 5 % of 100 either way, inclusive; percent signs divide; text in any case
    ("relaxed_accuracy", "105", "100", {}, 1, 1, 1),
    ("relaxed_accuracy", "105.1", "100", {}, 0, 0, 0),
    ("chartqa", "42%", "0.42", {}, 1, 1, 1),
    ("chartqa", "Blue", "blue", {}, 1, 1, 1),
    ("chartqa", " blue\n", "blue", {}, 1, 0, 1),
    ("chartqa", "0.0", "0", {}, 0, 0, 1),
    ("chartqa", "1,000", "1000", {}, 0, 0, 1),
    ("chartqa", "111", "100", {"max_relative_change": 0.12}, 1, 1, 1),
    ("exact_match", " YES ", "yes", {}, 1, 0, 0),
    ("exact_match", "red  car", "red car", {}, 0, 0, 1),
    ("exact_match", "Red!", "red", {"ignore_case": True, "ignore_punctuation": True}, 0, 1, 0),
    ("gqa", "Red.", "red", {}, 0, 1, 0),
    # a reference inside the answer, in any case; formulas without blanks but with their case
    ("ocrbench", "The sign says STOP here", ["stop", "halt"], {}, 1, 1, 1),
    ("ocrbench", r"\frac { 1 } { x }", r"\frac{1}{x}", FORMULA, 1, 1, 1),
    ("ocrbench", r"\FRAC{1}{x}", r"\frac{1}{x}", FORMULA, 0, 0, 0),
    ("ocrbench", "\uff33\uff34\uff2f\uff30", "STOP", {}, 0, 1, 0),
    ("ocrbench", "anything", "", {}, 1, 1, 0),
    # ten answers: 2 others equal for the three equal ones, 3 for the rest: (3 * 2/3 + 7 * 1) / 10
    ("vqa_accuracy", "a Dog", ["dog"] * 3 + ["cat"] * 7, {}, 0.9, 0.9, 0.9),
    ("vqa_accuracy", "two", ["2"] * 10, {}, 1, 1, 1),
    ("vqa_accuracy", "dont know", ["don't know"] * 10, {}, 1, 1, 1),
    ("vqa_accuracy", "dog", ["dog"], {}, 0, 0, 1),
    ("vqa_accuracy", "dog", ["dog", "cat", "cat"], {}, 2 / 9, 2 / 9, 1),  # (0 + 1/3 + 1/3) / 3
    ("vqa_accuracy", "none", ["0"] * 10, {}, 1, 1, 1),
    # a mark touches a blank of the answer, and not one that replaced another mark: the hyphens become blanks
    ("vqa_accuracy", "x/-y-/z c-d", ["x y z c d"] * 10, {}, 1, 1, 1),
    ("textvqa", "yes, it is", ["yes it is"] * 10, {}, 1, 1, 1),
    ("textvqa", "john's", ["john s"] * 10, {}, 0, 0, 0),
    ("yes_no", "Yes, there is.", "Yes", {}, 1, 1, 1),
    ("mme", "There is no dog: the answer is no", "No", {}, 1, 0, 1),
    ("mme", "yes or no", "Yes", {}, 0, 1, 0),
    ("mme", "Y", "Yes", {}, 0, 1, 0),
    ("mme", "nothing is there", "No", {}, 0, 1, 0),
    ("hallusionbench", "I cannot tell", "No", {}, 0, 1, 0),
    ("pope", "Yes.", "Yes", {}, 1, 0, 1),
    ("multiple_choice", "(B)", "B", {"choices": ANIMALS}, 1, 1, 1),
    ("multiple_choice", "It is a dog.", "B", {"choices": ANIMALS}, 1, 0, 1),
    ("mcq", "Cannot determine the answer", "B", {"choices": ANIMALS}, 0, 0, 0),
    ("mcq", "A or B", "A", {"choices": ANIMALS}, 0, 1, 0),
    ("mcq", "a cat or a dog", "A", {"choices": ANIMALS}, 0, 0, 0),
    # a letter counts among the last four words; a text counts in an answer of at most twice the length of all texts
    ("mcq", "I B three four five", "B", {"choices": ANIMALS}, 1, 1, 1),
    ("mcq", "B two three four five", "B", {"choices": ANIMALS}, 0, 1, 0),
    ("mcq", "it is a dog!", "B", {"choices": {"A": "cat", "B": "dog"}}, 1, 0, 1),
    ("mcq", "it is a dog!!", "B", {"choices": {"A": "cat", "B": "dog"}}, 0, 0, 0),
    ("mcq", "The answer is **C** because A and B are wrong", "C", {"choices": ANIMALS}, 1, 0, 1),
    ("mmbench", "B. dog", "B", {"choices": ANIMALS}, 1, 1, 1),
    ("mmbench", "A cat is shown", "A", {"choices": ANIMALS}, 1, 1, 1),
    ("ai2d", "dog", "B", {"choices": ANIMALS}, 1, 0, 1),
    ("ai2d", "(b)", "B", {"choices": ANIMALS}, 0, 1, 0),
    ("mmmu_pro", "Answer: $B", "B", {"choices": ANIMALS, "cot": True}, 1, 1, 1),
    ("mmmu_pro", "Answer: A\nWait.\nAnswer: B", "B", {"choices": ANIMALS, "cot": True}, 1, 1, 1),
    ("mmmu", "it weighs 12 kg", "12 kg", {}, 1, 0, 1),
    ("mathvista", "14", "14", INTEGER, 1, 1, 1),
    ("mathvista", "14.0", "14", INTEGER, 0, 1, 0),
    ("mathvista", "1.449", "1.45", FLOAT | {"precision": 2}, 0, 1, 0),
    ("mathvista", "1.45", "1.45", FLOAT | {"precision": 2.0}, 1, 0, 1),
    ("mathvista", "[2007, 2008]", "[2007, 2008]", {"answer_type": "list"}, 0, 1, 1),
    ("mathvista", "(C)", "12", OPTION, 1, 1, 1),
    ("mathvista", "1", "12", OPTION, 0, 0, 0),
    ("mathvision", "C", "C", {"choices": ["1", "2", "3"]}, 1, 1, 1),
    ("mathvision", r"\frac{3}{4}", "0.75", {}, 1, 1, 1),
    ("mathvision", r"so the area is \boxed{14}", "14", {}, 1, 1, 1),
    ("mathvision", "6*7", "42", {}, 1, 1, 1),
    ("mathvision", "42.001", "42", {}, 0, 1, 0),  # lmms-eval rounds to two decimals
    ("mathvision", "A", "42", {}, 1, 0, 0),
    ("mathvision", "__import__('os').getpid()", "42", {}, 0, 0, 0),
    ("aime", r"so \boxed{023}.", "23", {}, 1, 1, 1),
    ("aime", "Answer: 23.", "23", {}, 0, 0, 1),
    ("gpqa", "Answer: B", "B", {"choices": ANIMALS}, 1, 1, 1),
    ("gpqa", "I do not know", "A", {"choices": ANIMALS}, 0, 1, 0),
    ("ceval", "\u7b54\u6848\u662f B \u3002", "B", {"choices": ANIMALS}, 1, 1, 1),
    ("mmvet", "x = 5", "5", {"judgement": "0.7"}, 0.7, 0.7, 0.7),
    ("mmvet", "x = 5", "5", {"judgement": "1.0"}, 1, 1, 1),
    ("mmvet", "x = 5", "5", {"judgement": "0.7 because"}, 0, 0.7, 0),
    ("simpleqa", "Paris", "Paris", {"judgement": "A"}, 1, 1, 1),
    ("arena_hard", "hi", "hello", {"judgement": "[[A=B]]"}, 0.5, 0.5, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "options", "vlmevalkit", "lmms", "strict"),
    CASES,
    ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)],
)
def test_a_case_scores_as_worked_out_by_hand(metric, prediction, references, options, vlmevalkit, lmms, strict):
    for compat, expected in (("vlmevalkit", vlmevalkit), ("lmms-eval", lmms), ("strict", strict)):
        assert score(metric, prediction, references, compat, **options) == pytest.approx(expected), compat


def test_every_metric_without_an_extra_has_a_case():
    assert {find_metric(case[0]).name for case in CASES} == set(METRICS) - {"ifeval"}


def test_vlmevalkit_is_the_default_and_names_may_be_spelled_freely():
    assert score("DocVQA_VAL", "paris", "Paris") == score("ANLS", "paris", ["Paris"], compat="lmms_eval") == 1.0
    assert find_metric("MMBench_DEV_EN_V11") is METRICS["mmbench"]
    assert find_metric("MMMU_Pro_10c_COT") is METRICS["mmmu_pro"]
    assert find_metric("MathVista_MINI") is METRICS["mathvista"]
    assert find_metric("AI2D_TEST") is METRICS["ai2d"]


def test_options_may_have_the_names_that_the_projects_use():
    assert score("anls", "Pans", "Paris", anls_threshold=0.9) == score("anls", "Pans", "Paris", thresh_hold=0.9) == 0.0
    assert score("mcq", "(B)", "B", options=["x", "y"]) == 1.0
    assert score("ocrbench", "a b", "ab", dataset_name="HME100k", compat="lmms-eval") == 1.0


def test_an_option_of_mathvista_may_have_the_text_of_another_letter():
    swapped = {"question_type": "multi_choice", "choices": ["B", "A"]}
    assert score("mathvista", "(A)", "B", **swapped) == 1.0
    assert score("mathvista", "(B)", "B", answer_option="B", **swapped) == 1.0


def test_references_may_be_the_text_of_a_list():
    assert score("ocrbench", "halt", "['stop', 'halt']") == 1.0
    assert score("vqav2", "dog", [{"answer": "dog", "answer_id": i} for i in range(10)]) == 1.0
    assert score("mcq", "B", "B", choices="['x', 'y']") == 1.0
    assert score("mcq", "one x here", "A", choices=["one x", None, float("nan")]) == 1.0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("no_such", "a", "b"), {}, r"metric: 'no_such' is unknown\. Known names: anls, docvqa"),
        (("anls", "a", "b", "vlmeval"), {}, r"compat: 'vlmeval' is unknown\. Use vlmevalkit, lmms-eval, strict"),
        (("anls", "a", "b"), {"treshold": 0.5}, r"option 'treshold' is unknown\. Known options: .*threshold"),
        (("anls", "a", []), {}, "references: there is none"),
        (("mme", "yes", "maybe"), {}, "'maybe' is neither yes nor no"),
        (("mcq", "A", "A"), {"choices": "cat, dog"}, "choices: must be a list"),
        (("mcq", "A", "A"), {"choices": {"1": "cat"}}, "choices: '1' is not a letter"),
        (("mmvet", "a", "b"), {}, "a judge decides this metric"),
        (("ifeval", "a", None), {"instruction_id_list": ["x"], "kwargs": [{}, {}]}, "1 instructions with 2 sets"),
    ],
)
def test_a_wrong_argument_is_named_with_the_known_ones(arguments, options, message):
    with pytest.raises(EvaluationError, match=message):
        score(*arguments, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "1<<10**9",
        "(" * 5000,
        "-" * 900 + "1",
        r"\binom{100000000}{50000000}",
        r"\gcd(3^{999999}, 3)",
        "9^{9^{9}}",
    ],
)
def test_an_answer_cannot_keep_the_scorer_busy(answer):
    score("mathvision", "1", "2")  # loads the parser
    start = time.process_time()  # not wall time: the machine may be busy
    assert score("mathvision", answer, "42") == score("mathvision", answer, "42", "lmms-eval") == 0.0
    assert time.process_time() - start < 10


def test_a_judge_is_asked_again_and_then_the_item_has_failed():
    replies = iter(["no idea", "2.5", "0.4"])
    assert score("mmvet", "x", "y", judge=lambda prompt: next(replies)) == 0.4
    asked = []
    failed = ask(
        lambda prompt: asked.append(prompt) or "nan", "?", lambda reply: read_grade(reply, "strict"), num_tries=2
    )
    assert len(asked) == 2
    assert failed == Judgement(score=0.0, is_failed=True, prompt="?", reply="nan")


def test_a_judge_sees_question_reference_and_answer():
    prompts = []
    score("mmvet", "my answer", "one<AND>two", question="which?", judge=lambda prompt: prompts.append(prompt) or "1")
    assert all(text in prompts[0] for text in ("which?", "one <AND> two", "my answer"))


def test_two_replies_are_compared_in_both_orders():
    def prefers_the_first(prompt):
        return "[[A>B]]"

    def prefers_hello(prompt):
        return "[[A>>B]]" if prompt.index("hello") < prompt.index("bye") else "[[B>A]]"

    assert score("arena_hard", "bye", "hello", judge=prefers_the_first) == 0.5
    assert score("arena_hard", "bye", "hello", judge=prefers_hello) == 0.0
    assert read_verdict("[[A>B]] or [[B>A]]") is None


def test_a_strong_verdict_counts_for_three_games():
    def judge(prompt):
        return "[[A>>B]]" if prompt.index("bye") < prompt.index("hello") else "[[A>B]]"

    found = judge_item("arena_hard", "bye", ["hello"], "strict", judge=judge)
    assert (found.score, found.fields) == (3 / 4, {"weight": 4})  # three games won, one lost
    lost = judge_item("arena_hard", "bye", ["hello"], "strict", judge=lambda prompt: "[[A>>B]] no [[B>A]]")
    assert (lost.score, lost.fields, lost.is_failed) == (0.0, {"weight": 2}, True)


def test_a_refused_prompt_is_a_failed_judgement_and_other_errors_stop():
    def refuses(prompt):
        raise RequestRefusedError("http://x/v1: refuses the request (HTTP 400: too long).")

    found = judge_item("mmvet", "x", ["y"], "strict", judge=refuses)
    assert (found.score, found.is_failed, found.judgements[0].reply) == (
        0.0, True, "http://x/v1: refuses the request (HTTP 400: too long).",
    )  # fmt: skip

    def fails(prompt):
        raise EvaluationError("http://x/v1: no answer after 6 tries.")

    with pytest.raises(EvaluationError, match="no answer after 6 tries"):
        judge_item("mmvet", "x", ["y"], "strict", judge=fails)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("A", (1, True)),
        ("B", (0, True)),
        ("C", (0, False)),
        ("Correct: A", (1, True)),
        ("A: CORRECT", (1, True)),
        ("?", (0, True)),
    ],
)
def test_the_letter_of_a_judge_stands_alone(reply, expected):
    found = judge_item("simpleqa", "x", ["y"], "strict", judge=lambda prompt: reply)
    assert (found.score, found.fields["attempted"]) == expected
    assert found.is_failed == (reply == "?")


def test_metrics_load_neither_torch_nor_numpy():
    code = (
        "import sys; from mindvl_merge.evaluation import score; score('anls', 'a', 'b'); score('mcq', 'A', 'A');"
        "print(sorted({'torch', 'numpy', 'transformers', 'sympy', 'mindvl_data'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
def test_ifeval_counts_the_instructions_that_are_followed():
    for name in ("lm_eval", "langdetect", "immutabledict"):
        pytest.importorskip(name)
    assert _instruction("punctuation:no_comma") is not None
    options = {
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["sun"]}],
    }
    assert score("ifeval", "the sun shines", None, **options) == 1.0
    assert score("ifeval", "the sun, the moon", None, **options) == 0.0
    assert score("ifeval", "the sun, the moon", None, level="instruction", **options) == 0.5
    assert score("ifeval", "Sure, here:\nthe sun shines", None, mode="loose", **options) == 1.0
