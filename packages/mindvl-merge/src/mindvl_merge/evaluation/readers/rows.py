# SPDX-License-Identifier: Apache-2.0
"""Turn a row of a table (TSV or parquet) into an Item: find its question, images, options and references.

Comes after tsv.py and parquet.py, which read the rows; the columns are those of VLMEvalKit's files and of the Hugging
Face data sets that lmms-eval uses.
"""

import base64
import binascii
import hashlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import EmbeddedImage, ImageSource, Item
from mindvl_merge.evaluation.metrics.options import Compat, is_missing, read_choices, read_list
from mindvl_merge.evaluation.metrics.registry import OPTIONS, Metric
from mindvl_merge.evaluation.prompts import as_hint, build_prompt, place_images

Row = Mapping[str, Any]

ID_COLUMNS = ("index", "pid", "id", "ID", "Record ID", "key", "questionId")
QUESTION_COLUMNS = ("query", "question", "Question", "problem", "Problem", "prompt")
ANSWER_COLUMNS = ("answer", "answers", "gt_answer", "Answer", "label", "Correct Answer")
IMAGE_COLUMNS = ("image", "decoded_image", "images", "image_path", "image_bytes")
GPQA_COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
MAX_REFERENCE_LENGTH = 64  # characters; a longer image cell is an image, a shorter one the index of another row

# Fields that aggregate reads, beyond those of the metrics.
_GROUP_FIELDS = (
    "index", "g_index", "category", "l2-category", "split", "skills", "task", "set_id", "figure_id", "question_id",
    "subcategory",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a row comes from."""

    path: Path
    number: int  # line of a text file, row of a table, from 1
    unit: str = ""  # "row " for tables without lines

    def __str__(self) -> str:
        return f"{self.path}:{self.unit}{self.number}"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The benchmark that a file belongs to."""

    name: str  # of the benchmark, such as MMMU_Pro_10c_COT
    metric: Metric
    compat: Compat

    @property
    def is_cot(self) -> bool:
        """Whether answers end with a line `Answer: LETTER`."""
        return self.metric.name == "mmmu_pro" and "cot" in self.name.lower()


def read_row(row: Row, place: Place, kind: Kind, images: Sequence[ImageSource]) -> Item:
    """The item of a row.

    Raises:
        EvaluationError: Names file, line and problem.
    """
    given = {name: value for name, value in row.items() if not is_missing(value) and value != ""}
    choices = _choices(given, place)
    question = _question(given, kind, place)
    references = _references(given, choices, kind, place)
    prompt = build_prompt(kind.metric.name, question, choices, as_hint(given.get("hint")), kind.compat, cot=kind.is_cot)
    text, order = place_images(prompt, len(images), str(place))
    options = {name: given[name] for name in OPTIONS & given.keys() if name not in ("choices", "question", "prompt")}
    if choices:
        options["choices"] = choices
    if kind.is_cot:
        options["cot"] = True
    options |= {"question": question} if kind.metric.needs_judge or kind.metric.name == "ifeval" else {}
    if kind.metric.name == "ifeval":
        options["prompt"] = question
    fields = {name: given[name] for name in _GROUP_FIELDS if name in given}
    fields |= _group_fields(given, kind)
    return Item(
        id=row_id(given, place),
        task=kind.name,
        images=tuple(images[number] for number in order),
        question=text,
        answer=_shown(references),
        metric=kind.metric.name,
        references=references,
        options=options,
        fields=fields,
    )


def row_id(row: Row, place: Place) -> str:
    """The value of the first ID column, or the file and the row's number."""
    name = next((name for name in ID_COLUMNS if not is_missing(row.get(name))), None)
    return f"{place.path.stem}-{place.number}" if name is None else str(row[name])


def _question(row: Row, kind: Kind, place: Place) -> str:
    name = next((name for name in QUESTION_COLUMNS if name in row), None)
    if name is not None:
        return str(row[name])
    if kind.metric.name == "mmmu_pro":  # the vision split has its questions in the images
        return ""
    raise EvaluationError(f"{place}: the question is empty. Fill the column or remove the row.")


def _choices(row: Row, place: Place) -> dict[str, str]:
    if all(name in row for name in GPQA_COLUMNS):
        texts = [str(row[name]).strip() for name in GPQA_COLUMNS]
        # a fixed order that does not depend on which is right
        texts.sort(key=lambda text: hashlib.sha256((str(row.get("Question")) + text).encode()).digest())
        return dict(zip("ABCD", texts, strict=True))
    lettered = {letter: row[letter] for letter in string.ascii_uppercase if row.get(letter, "nan") != "nan"}
    listed = row.get("options", row.get("choices"))
    try:
        return read_choices(lettered or (None if listed is None or len(listed) == 0 else listed))
    except EvaluationError as error:
        raise EvaluationError(f"{place}: {error}") from error


def _references(row: Row, choices: Mapping[str, str], kind: Kind, place: Place) -> Any:
    if not kind.metric.needs_references:
        return None
    name = next((name for name in ANSWER_COLUMNS if name in row), None)
    answers = None if name is None else row[name]
    listed = None if isinstance(answers, str) else read_list(answers)
    if answers is None or (listed is not None and not listed):
        raise EvaluationError(
            f"{place}: the answer is empty. Fill the column; rows of a test split without answers cannot be scored."
        )
    if name == "Correct Answer":
        return next(letter for letter, text in choices.items() if text == str(answers).strip())
    if listed is not None:
        return [str(entry["answer"] if isinstance(entry, Mapping) else entry) for entry in listed]
    text = str(answers)
    # AI2D as lmms-eval has it: the number of the option
    is_number = bool(choices) and text.isdecimal() and text not in choices.values() and int(text) < len(choices)
    return list(choices)[int(text)] if is_number else text


def _group_fields(row: Row, kind: Kind) -> dict[str, Any]:
    """Groups under the names of VLMEvalKit's columns, for files of lmms-eval."""
    fields: dict[str, Any] = {}
    if kind.metric.name == "yes_no":  # both questions of an image in MME
        fields["image"] = row.get("image_path", row.get("question_id", row.get("index")))
    if kind.metric.name == "ocrbench" and "category" not in row:
        fields["category"] = row.get("question_type")
    if kind.metric.name == "mmvet" and "category" not in row:
        fields["category"] = row.get("capability")
    if "L2-category" in row:
        fields["l2-category"] = row["L2-category"]
    if kind.metric.name == "relaxed_accuracy" and "split" not in row and "type" in row:
        fields["split"] = row["type"]
    if isinstance(row.get("metadata"), Mapping):  # MathVista
        fields |= {name: row["metadata"][name] for name in ("skills", "task") if name in row["metadata"]}
    return fields


def _shown(references: Any) -> str:
    if references is None:
        return ""
    return str(references[0]) if isinstance(references, list) else str(references)


def decode_image(text: str, name: str) -> EmbeddedImage:
    """An image from base64, with or without a `data:` prefix.

    Raises:
        EvaluationError: It is not base64, or empty.
    """
    body = text.partition(",")[2] if text.startswith("data:") else text
    try:
        content = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise EvaluationError(f"{name}: the image is not valid base64 ({error}). Write the file again.") from error
    if not content:
        raise EvaluationError(f"{name}: the image is empty. Write the file again.")
    return EmbeddedImage(name=name, content=content)


def find_image(directory: Path, stem: str, name: str, where: str) -> Path:
    """An image file that a row names, beside the benchmark file or in `images/`.

    Raises:
        EvaluationError: It does not exist.
    """
    for candidate in (directory / name, directory / "images" / name, directory / "images" / stem / name):
        if candidate.is_file():
            return candidate
    raise EvaluationError(f"{where}: image {name!r} does not exist beside the file or in images/. Correct the path.")
