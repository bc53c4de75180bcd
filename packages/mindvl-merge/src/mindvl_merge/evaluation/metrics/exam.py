# SPDX-License-Identifier: Apache-2.0
"""Text benchmarks: AIME, GPQA, and IFEval (whose checkers come from lm-eval, the extra `text`).

VLMEvalKit has none of them: AIME follows lmms-eval, GPQA and C-Eval are multiple-choice questions.
"""

import re
from collections.abc import Sequence
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.metrics.choices import as_letter, multiple_choice
from mindvl_merge.evaluation.metrics.options import Compat, read_list

_TURN = "<|im_start|>"
_ANSWER = re.compile(r"(?i)answer\s*:\s*(.*)", re.DOTALL)


def aime(prediction: str, references: Sequence[str], compat: Compat, **_: Any) -> float:
    """1.0 if the boxed number, the text after `Answer:`, or the whole answer is the reference; 023 equals 23.

    `strict` also ignores white space, dollar signs and a final period around the number.
    """
    given = _final_answer(prediction)
    if compat == "strict":
        given = given.strip().strip("$").strip().removesuffix(".")
    return float(any(_without_zeros(given) == _without_zeros(reference) for reference in references))


def gpqa(prediction: str, references: Sequence[str], compat: Compat, *, choices: Any = None, **_: Any) -> float:
    """As `multiple_choice`; lmms-eval reads the final answer and takes A if it is no letter from A to D."""
    if compat != "lmms-eval":
        return multiple_choice(prediction, references, compat, choices=choices)
    given = _final_answer(prediction)
    given = given.upper() if given in ("a", "b", "c", "d") else given
    given = given if given in ("A", "B", "C", "D") else "A"
    return float(given in [as_letter(reference, {}) for reference in references])


def _without_zeros(text: str) -> str:
    return str(int(text)) if text.isdecimal() else text


def _final_answer(text: str) -> str:
    """The last box, else the text after the first `Answer:`, of the last turn."""
    if _TURN in text:
        has_answer = f"{_TURN}answer\n" in text
        text = text.split(f"{_TURN}answer\n" if has_answer else _TURN)[-1]
        if not has_answer and "\n" in text:
            text = text.split("\n", 1)[1]
    box = _last_box(text)
    if box is not None:
        return box
    matches = _ANSWER.findall(text)
    return str(matches[-1]) if matches else text


def _last_box(text: str) -> str | None:
    if "\\boxed " in text:
        return text.split("\\boxed ")[-1].split("$")[0]
    start = text.rfind("\\boxed")
    start = start if start >= 0 else text.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return text[text.index("{", start) + 1 : place]
    return None


def ifeval(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    instruction_id_list: Any = None,
    kwargs: Any = None,
    prompt: str = "",
    level: str = "prompt",
    mode: str = "strict",
    **_: Any,
) -> float:
    """Share of the instructions that the answer follows (`level="instruction"`), or 1.0 if it follows all.

    Args:
        references: Not used; IFEval has none.
        instruction_id_list: Names of the instructions, such as `punctuation:no_comma`.
        kwargs: Arguments of each instruction; empty ones are ignored.
        mode: `strict`, or `loose`: without the first or the last line and without asterisks counts too.

    Raises:
        EvaluationError: An instruction is unknown, or lm-eval is not installed.
    """
    followed = followed_instructions(prediction, instruction_id_list, kwargs, prompt, mode=mode)
    return float(all(followed)) if level == "prompt" else sum(followed) / len(followed)


def followed_instructions(
    prediction: str, instruction_id_list: Any, kwargs: Any, prompt: str, *, mode: str
) -> list[bool]:
    """Whether the answer follows each instruction."""
    names = read_list(instruction_id_list) or []
    arguments = read_list(kwargs) or [{} for _ in names]
    if not names or len(arguments) != len(names):
        raise EvaluationError(
            f"instruction_id_list: {len(names)} instructions with {len(arguments)} sets of kwargs. Give one for each."
        )
    answers = [prediction] if mode == "strict" else _loose_answers(prediction)
    followed = []
    for name, values in zip(names, arguments, strict=True):
        instruction = _instruction(str(name))
        instruction.build_description(**{key: value for key, value in (values or {}).items() if value})
        needed = instruction.get_instruction_args()
        if needed and "prompt" in needed:
            instruction.build_description(prompt=prompt)
        followed.append(any(bool(text.strip()) and bool(instruction.check_following(text)) for text in answers))
    return followed


def _loose_answers(prediction: str) -> list[str]:
    lines = prediction.split("\n")
    parts = (lines, lines[1:], lines[:-1], lines[1:-1])
    answers = [prediction, *("\n".join(part).strip() for part in parts[1:])]
    return [*answers, *(answer.replace("*", "") for answer in answers)]


def _instruction(name: str) -> Any:
    try:
        import langdetect
        from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise EvaluationError(
            "ifeval: lm-eval with its IFEval checkers is not installed. Install it with pip install 'mindvl-merge[text]'."
        ) from error
    langdetect.DetectorFactory.seed = 0  # its answers are random otherwise, and checks of case depend on them
    if name not in INSTRUCTION_DICT:
        raise EvaluationError(f"ifeval: instruction {name!r} is unknown. Known: {', '.join(sorted(INSTRUCTION_DICT))}.")
    return INSTRUCTION_DICT[name](name)
