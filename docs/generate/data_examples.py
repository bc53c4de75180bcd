# SPDX-License-Identifier: Apache-2.0
"""One example for each format of training data.

Comes before formats.py, which writes the files and makes the page. A test compares each record with the one that the code writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMAGE = "<an image file>"  # in files: the bytes of an image, or the same in base64
ASKED = "What is written?"
USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True, kw_only=True)
class DataExample:
    """Files as people keep them, and the first record that `mindvl data write` makes of them."""

    title: str
    format: str
    reason: str  # what `--format auto` says
    files: Mapping[str, Any]  # name -> text, IMAGE, or for tables and JSON lines a list of rows
    source: str  # the file or directory that is given to the command
    record: Mapping[str, Any]
    note: str = ""


def _turns(question: str, answer: str, *, parts: bool = True) -> dict[str, Any]:
    content: Any = [{"type": "image"}, {"type": "text", "text": question}]
    reply: Any = [{"type": "text", "text": answer}] if parts else answer
    return {"messages": [{"role": USER, "content": content}, {"role": ASSISTANT, "content": reply}]}


def _talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


_CAPTION = {"content": [{"type": "image"}, "A red square."]}
_QA = {"image": "1.png", "question": ASKED, "answer": "4071"}

DATA: tuple[DataExample, ...] = (
    DataExample(
        title="LLaVA and ShareGPT",
        format="llava",
        reason="the first record has `conversations`",
        files={
            "data.json": [{"id": "a1", "image": "1.png", "conversations": _talk(f"<image>{ASKED}", "4071")}],
            "1.png": IMAGE,
        },
        source="data.json",
        record={**_turns(ASKED, "4071"), "id": "a1"},
    ),
    DataExample(
        title="Boxes in LLaVA records",
        format="llava",
        reason="the first record has `conversations`",
        files={
            "data.jsonl": [
                {
                    "image": "1.png",
                    "conversations": _talk("<image>Where is it?", "<box:0>"),
                    "boxes": [[4, 8, 20, 24]],
                }
            ],
            "1.png": IMAGE,
        },
        source="data.jsonl",
        record={
            "messages": [
                _turns("Where is it?", "")["messages"][0],
                {"role": ASSISTANT, "content": [{"type": "box", "image": 0, "xyxy": [4, 8, 20, 24]}]},
            ]
        },
        note="Boxes and points are in pixels of the original image.",
    ),
    DataExample(
        title="LLaMA-Factory and ms-swift",
        format="messages",
        reason="the first record has `messages`",
        files={
            "data.json": [
                {
                    "messages": [
                        {"role": USER, "content": f"<image>{ASKED}"},
                        {"role": ASSISTANT, "content": "4071"},
                    ],
                    "images": ["1.png"],
                }
            ],
            "1.png": IMAGE,
        },
        source="data.json",
        record=_turns(ASKED, "4071"),
        note=(
            "A `dataset_info.json` of LLaMA-Factory that describes one local file may be named too. Records of ms-swift with "
            "`objects` (`<ref-object>`, `<bbox>`) are refused."
        ),
    ),
    DataExample(
        title="OpenAI messages",
        format="messages",
        reason="the first record has `messages`",
        files={
            "data.jsonl": [
                {
                    "messages": [
                        {
                            "role": USER,
                            "content": [
                                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
                                {"type": "text", "text": ASKED},
                            ],
                        },
                        {"role": ASSISTANT, "content": "4071"},
                    ]
                }
            ]
        },
        source="data.jsonl",
        record=_turns(ASKED, "4071", parts=False),
        note="`url` may also be a file name, or an address with `--fetch-urls`.",
    ),
    DataExample(
        title="Alpaca",
        format="messages",
        reason="the first record has `instruction` and `output`",
        files={
            "data.json": [{"instruction": ASKED, "input": "", "output": "4071", "images": ["1.png"]}],
            "1.png": IMAGE,
        },
        source="data.json",
        record=_turns(ASKED, "4071", parts=False),
    ),
    DataExample(
        title="Questions and captions in JSON",
        format="messages",
        reason="the first record has `image`, `question`, `answer`",
        files={"data.jsonl": [_QA], "1.png": IMAGE},
        source="data.jsonl",
        record=_turns(ASKED, "4071"),
        note="Fields have the names of table columns, below.",
    ),
    DataExample(
        title="CSV and TSV tables",
        format="table",
        reason="the file is a table with the columns image, caption",
        files={"data.csv": [{"image": "1.png", "caption": "A red square."}], "1.png": IMAGE},
        source="data.csv",
        record=_CAPTION,
        note="A table with `question` and `answer` gives one question and one answer.",
    ),
    DataExample(
        title="Image data set of the datasets library",
        format="messages",
        reason="the directory has metadata.jsonl, and the first record has `file_name`, `text`",
        files={"photos/metadata.jsonl": [{"file_name": "1.png", "text": "A red square."}], "photos/1.png": IMAGE},
        source="photos",
        record=_CAPTION,
        note="`metadata.csv` is read as a table.",
    ),
    DataExample(
        title="Captions beside images",
        format="imagefolder",
        reason="1.png has a caption beside it",
        files={"photos/1.png": IMAGE, "photos/1.txt": "A red square.\n"},
        source="photos",
        record={**_CAPTION, "id": "1.png"},
    ),
    DataExample(
        title="captions.jsonl",
        format="imagefolder",
        reason="the directory has captions.jsonl",
        files={"photos/captions.jsonl": [{"image": "1.png", "text": "A red square."}], "photos/1.png": IMAGE},
        source="photos",
        record=_CAPTION,
    ),
    DataExample(
        title="One directory for each class",
        format="classes",
        reason="its subdirectories hold images without captions",
        files={"photos/red_square/1.png": IMAGE},
        source="photos",
        record={
            **_turns("What does the image show?", "red square", parts=False),
            "id": "red_square/1.png",
            "meta": {"class": "red_square"},
        },
    ),
    DataExample(
        title="Parquet",
        format="parquet",
        reason="the file is a parquet file",
        files={"data.parquet": [{"image": {"bytes": IMAGE, "path": None}, "question": ASKED, "answer": "4071"}]},
        source="data.parquet",
        record=_turns(ASKED, "4071"),
        note=(
            "Media are columns of bytes, file names or `{bytes, path}`; the other columns are a conversation, a question and an "
            "answer, or a caption. A directory and a pattern of names are read too."
        ),
    ),
    DataExample(
        title="Data set saved by the datasets library",
        format="datasets",
        reason="the directory has state.json",
        files={"saved/data.arrow": [{"image": {"bytes": IMAGE, "path": None}, "caption": "A red square."}]},
        source="saved",
        record=_CAPTION,
        note="The directory that `save_to_disk` writes; columns as in parquet files.",
    ),
    DataExample(
        title="VLMEvalKit tables",
        format="tsv",
        reason="the table has the columns of VLMEvalKit",
        files={
            "data.tsv": [
                {"index": "1", "image": IMAGE, "question": "Which color?", "A": "red", "B": "blue", "answer": "A"}
            ]
        },
        source="data.tsv",
        record={
            **_turns("Which color?\nA. red\nB. blue\nAnswer with the letter of the right option.", "A", parts=False),
            "id": "1",
        },
    ),
    DataExample(
        title="Plain text",
        format="text",
        reason="the first record has `text` and no media",
        files={"data.jsonl": [{"text": "A text that is trained on as a whole."}]},
        source="data.jsonl",
        record={"content": "A text that is trained on as a whole."},
    ),
    DataExample(
        title="webdataset shards",
        format="webdataset",
        reason="it is an address, a pattern or a tar file",
        files={"data.tar": [{"0001.png": IMAGE, "0001.txt": "A red square."}]},
        source="data.tar",
        record={**_CAPTION, "id": "0001"},
        note="Tar files can also be indexed where they are, without writing them again.",
    ),
)
