# SPDX-License-Identifier: Apache-2.0
"""Let people verify answers that models wrote (paper, appendix B.3 and B.1.6): a queue as JSON lines, and decisions back.

`verification_queue` writes DIRECTORY/queue.jsonl and the images beside it; people copy lines, fill in `decision`, `by` and
where needed `edited_answer`, and `apply_verification` reads them in later runs. A
decision belongs to a question, that is to the media and everything before the answer: what a person accepted or wrote
replaces whatever a model answers, in every later run.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.dialogue import answer, question_key, turns, with_answer
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Decision, Drop, Outcome, Signatures, Step, register
from mindvl_data.errors import DataError
from mindvl_data.shards.atomic import AtomicFile, write_atomically
from mindvl_data.shards.media import media_extension

DECISIONS = ("accept", "edit", "reject")
_KEY_BYTES = 16


@dataclass(frozen=True)
class PersonDecision:
    """What a person decided about a question.

    Attributes:
        decision: `accept`, `edit` or `reject`.
        answer: The accepted or edited answer; "" if rejected.
        by: Who decided.
        note: Reason, "" if none was given.
    """

    decision: Literal["accept", "edit", "reject"]
    answer: str
    by: str
    note: str


@dataclass(frozen=True, kw_only=True)
class ApplyVerification:
    """Parameters of `apply_verification`.

    Attributes:
        decisions: JSON lines that people filled in; the file may be missing in the first run. Later lines replace
            earlier ones about the same question.
    """

    decisions: Path


@Step(
    config=ApplyVerification,
    summary="Use the answers that people accepted or wrote, and drop records that they rejected.",
    section="B.3",
    needs=("text",),
    gives=("verification", "verified_by"),
    reasons={"rejected": "A person rejected the record."},
    prepare=lambda config, context: read_decisions(config.decisions),
)
def apply_verification(records: list[Record], config: ApplyVerification, context: Context) -> Sequence[Outcome]:
    """Use the answers that people accepted or wrote, and drop what they rejected (paper, appendix B.3)."""
    decisions = context.resource(("decisions of people", config), lambda: read_decisions(config.decisions))
    return [_decided(record, decisions) for record in records]


@dataclass(frozen=True, kw_only=True)
class VerificationQueue:
    """Parameters of `verification_queue`.

    Attributes:
        directory: Directory of queue.jsonl and the images of the questions.
        facts: Records for which one of these facts is true are to be verified.
        undecided: `drop` or `keep` them until a person has decided.
        share: Share of them, chosen at random, that is put into the queue; the others are kept. 1 for all.
    """

    directory: Path
    facts: tuple[str, ...] = ("reannotated",)
    undecided: Literal["drop", "keep"] = "drop"
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.facts:
            raise ValueError("facts: is empty. Name the facts of records to verify, for example reannotated.")
        if not 0 < self.share <= 1:
            raise ValueError(f"share: must be greater than 0 and at most 1, got {self.share}. Correct it.")


def sign(records: list[Record], config: VerificationQueue, context: Context) -> Sequence[NDArray[np.uint8]]:
    """Store each question that a person has to see; the signature is its key."""
    store = context.cache / "verification"
    store.mkdir(parents=True, exist_ok=True)
    return [_stored(record, config, context, store) for record in records]


def decide(signatures: Signatures, config: VerificationQueue, context: Context, directory: Path) -> Iterator[Decision]:
    """Write the queue in the order of the input, each question once (paper, appendix B.3)."""
    store = context.cache / "verification"
    config.directory.mkdir(parents=True, exist_ok=True)
    written: set[bytes] = set()
    with AtomicFile(config.directory / "queue.jsonl") as queue:
        for numbers, pieces, rows in signatures.blocks():
            for number, piece, row in zip(numbers.tolist(), pieces.tolist(), rows, strict=True):
                key = row.tobytes()
                if key not in written:
                    written.add(key)
                    queue.write((store / _stored_name(key.hex(), number, piece)).read_bytes() + b"\n")
                if config.undecided == "drop":
                    yield Decision(number, piece, Drop("not_verified", key.hex()))


def read_decisions(path: Path) -> dict[str, PersonDecision]:
    """The decisions of people, by the key of the question; empty if the file does not exist.

    Raises:
        DataError: A line is not a decision.
    """
    found: dict[str, PersonDecision] = {}
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise DataError(f"{path}: the decisions cannot be read: {error}. Check the file.") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            key, decision = _parsed(line, f"{path}:{number}")
            found[key] = decision
    return found


def _parsed(line: bytes, where: str) -> tuple[str, PersonDecision]:
    try:
        value: dict[str, Any] = json.loads(line.decode("utf-8-sig"))
        fields = {name: value.get(name) or "" for name in ("key", "decision", "by", "answer", "edited_answer", "note")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{where}: the line is not a JSON object ({error}). Correct it.") from error
    wrong = [name for name, text in fields.items() if not isinstance(text, str)]
    if wrong:
        raise DataError(f"{where}: {wrong[0]}: must be a text, got {fields[wrong[0]]!r:.100}. Correct it.")
    if not fields["key"] or not fields["by"].strip():
        raise DataError(f"{where}: key and by are required. Copy the line of the queue, and write who decided in by.")
    decision = fields["decision"]
    if decision not in DECISIONS:
        raise DataError(f"{where}: decision: {decision!r:.100} is not known. Use {', '.join(DECISIONS)}.")
    text = {"accept": fields["answer"], "edit": fields["edited_answer"], "reject": ""}[decision]
    if decision != "reject" and not text.strip():
        name = "answer" if decision == "accept" else "edited_answer"
        raise DataError(
            f"{where}: {name}: is empty, but decision is {decision}. Write the answer, or reject the record."
        )
    return fields["key"], PersonDecision(decision, text, fields["by"].strip(), fields["note"].strip())  # type: ignore[arg-type]


def _decided(record: Record, decisions: dict[str, PersonDecision]) -> Outcome:
    decision = decisions.get(question_key(record)) if decisions else None
    if decision is None:
        return record
    if decision.decision == "reject":
        return Drop("rejected", f"{decision.by}: {decision.note}".rstrip(": "), {"verified_by": decision.by})
    old = answer(record)
    changed = record if decision.answer == old else with_answer(record, decision.answer)
    if decision.answer != old:
        changed = changed.with_body(replaced_answer=record.body.get("replaced_answer", old))
    return changed.with_facts(verification=f"{decision.decision}ed", verified_by=decision.by)


def _stored(record: Record, config: VerificationQueue, context: Context, store: Path) -> NDArray[np.uint8]:
    """The key of the question [1, 16], or [0, 16] if no person has to see it."""
    is_chosen = context.random(record, "verification").random() < config.share
    if "verification" in record.facts or not is_chosen or not any(record.facts.get(fact) for fact in config.facts):
        return np.zeros((0, _KEY_BYTES), np.uint8)
    key = question_key(record)
    images = [_image_file(medium, config.directory) for medium in record.media]
    *history, last = turns(record)
    shown = history or [(last[0], [part for part in last[1] if isinstance(part, bytes)])]  # a caption is the answer
    names = iter(images)
    line = {
        "key": key,
        "id": record.id,
        "question": [
            {"role": role, "parts": [part if isinstance(part, str) else {"image": next(names)} for part in parts]}
            for role, parts in shown
        ],
        "answer": answer(record),
        "replaced_answer": record.body.get("replaced_answer", ""),
        "facts": record.facts,
        "decision": "",
        "by": "",
        "edited_answer": "",
        "note": "",
    }
    # Records with the same question have files of their own, so that the queue does not depend on which worker is last.
    write_atomically(
        store / _stored_name(key, record.number, record.piece),
        json.dumps(line, ensure_ascii=False, default=_plain).encode("utf-8", "replace"),
    )
    return np.frombuffer(bytes.fromhex(key), np.uint8).reshape(1, _KEY_BYTES)


def _stored_name(key: str, number: int, piece: int) -> str:
    return f"{key}-{number}-{piece}.json"


def _image_file(medium: bytes, directory: Path) -> str:
    """Store an image beside the queue; returns its name there."""
    name = f"media/{sha256(medium).hexdigest()[:32]}.{media_extension(medium) or 'bin'}"
    path = directory / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, medium)
    return name


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


register(
    Step(
        name="verification_queue",
        config=VerificationQueue,
        summary="Write questions with answers of models to a queue that people verify.",
        section="B.3",
        needs=("text",),
        reasons={"not_verified": "No person has decided about the answer yet."},
        sign=sign,
        decide=decide,
    )
)
