# SPDX-License-Identifier: Apache-2.0
"""The reference of input formats: write the files of the examples, and show them with what becomes of them.

Comes after data_examples.py and benchmark_examples.py, before stage.py.
"""

import base64
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark_examples import BENCHMARKS
from data_examples import DATA, IMAGE
from PIL import Image


def materialize(files: Mapping[str, Any], directory: Path) -> None:
    """Write the files of an example."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content == IMAGE:
            path.write_bytes(_image())
        elif isinstance(content, str):
            path.write_text(content)
        elif path.suffix in (".parquet", ".arrow"):
            _write_columns(content, path)
        elif path.suffix == ".tar":
            _write_tar(content, path)
        else:
            path.write_text(_text(name, content, base64.b64encode(_image()).decode()))


def data_page() -> str:
    """A section for each format of training data."""
    return "\n".join(
        _section(
            one.title,
            [f"`--format {one.format}`, recognized because {one.reason}.", one.note],
            one.files,
            "The record",
            _compact(one.record),
        )
        for one in DATA
    )


def benchmark_page() -> str:
    """A section for each kind of benchmark file."""
    return "\n".join(
        _section(
            one.title,
            [f"Scored by `{one.metric}`." if one.metric else "Scored as the line says.", one.note],
            one.files,
            "The question, and the references",
            f"{one.question}\n\n{json.dumps(one.references)}",
        )
        for one in BENCHMARKS
    )


def _section(title: str, notes: Sequence[str], files: Mapping[str, Any], result: str, shown: str) -> str:
    lines = [f"### {title}", "", " ".join(note for note in notes if note), ""]
    for name, content in files.items():
        if content == IMAGE:
            continue
        lines += [f"`{name}`:", "", "```text", _text(name, content, "iVBORw0KGgo...").strip(), "```", ""]
    return "\n".join([*lines, f"{result}:", "", "```text", shown, "```", ""])


def _compact(record: Mapping[str, Any]) -> str:
    """JSON with one line for each message or turn."""
    fields = []
    for name, value in record.items():
        is_long = isinstance(value, list) and len(value) > 1 and all(isinstance(entry, Mapping) for entry in value)
        shown = "[\n   " + ",\n   ".join(map(json.dumps, value)) + "]" if is_long else json.dumps(value)
        fields.append(f"{json.dumps(name)}: {shown}")
    return "{" + ",\n ".join(fields) + "}"


def _text(name: str, content: Any, image: str) -> str:
    """The content of a file, with `image` for the bytes of images."""
    suffix = Path(name).suffix
    if isinstance(content, str):
        text = content
    elif suffix == ".json":
        text = "[\n" + ",\n".join(_compact(row) for row in content) + "\n]"
    elif suffix in (".csv", ".tsv"):
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, content[0], delimiter="," if suffix == ".csv" else "\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(content)
        text = buffer.getvalue()
    else:
        text = "\n".join(json.dumps(row) for row in content) + "\n"
    return text.replace(IMAGE, image)


def _image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(file, "PNG")
    return file.getvalue()


def _with_bytes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_bytes(inner) for key, inner in value.items()}
    return _image() if value == IMAGE else value


def _is_image(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"bytes", "path"}


def _write_columns(rows: Any, path: Path) -> None:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns = {
        name: pyarrow.array([_with_bytes(row[name]) for row in rows], kind if _is_image(rows[0][name]) else None)
        for name in rows[0]
    }
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    (path.parent / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))


def _write_tar(samples: Any, path: Path) -> None:
    import tarfile

    with tarfile.open(path, "w") as archive:
        for sample in samples:
            for name, content in sample.items():
                member = tarfile.TarInfo(name)
                body = _image() if content == IMAGE else content.encode()
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
