# SPDX-License-Identifier: Apache-2.0
"""Writing: the same bytes every time, pictures untouched, refusals by file and row."""

import json
from pathlib import Path

import pytest

from mindvl_data import DataError, write_shards
from mindvl_data.shards import scan_members


def source(folder: Path, count: int = 5) -> Path:
    folder.mkdir()
    rows = []
    for number in range(count):
        (folder / f"{number}.dat").write_bytes(b"\xff\xd8\xff" + bytes([number]) * 20)
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": str(number)}]
        rows.append({"id": number, "image": f"{number}.dat", "conversations": turns, "split": "train"})
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def test_samples_are_cut_into_shards_and_pictures_copied_byte_for_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    count = write_shards(
        source(tmp_path / "raw"),
        tmp_path / "digits",
        format="llava",
        samples_per_shard=2,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert count == 5
    assert calls == [(n, 5) for n in range(1, 6)]
    shards = sorted((tmp_path / "digits").iterdir())
    assert [s.name for s in shards] == [f"shard-00000{n}.tar" for n in range(3)]
    members = list(scan_members(shards[1]))
    assert [m.name for m in members] == [f"{k:09d}.{e}" for k in (2, 3) for e in ("json", "0.jpg")]
    content = shards[1].read_bytes()
    record, picture = (content[m.offset : m.offset + m.length] for m in members[:2])
    assert picture == b"\xff\xd8\xff" + b"\x02" * 20
    assert json.loads(record) == {
        "source": "digits",
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
        ],
        "id": "2",
        "meta": {"split": "train"},
    }


def test_the_same_source_gives_the_same_shards(tmp_path: Path) -> None:
    rows = source(tmp_path / "raw")
    for out in ("1", "2"):
        write_shards(rows, tmp_path / out, format="llava", source_name="digits")
    assert (tmp_path / "1/shard-000000.tar").read_bytes() == (tmp_path / "2/shard-000000.tar").read_bytes()


def test_a_folder_with_shards_is_not_written_again(tmp_path: Path) -> None:
    rows = source(tmp_path / "raw")
    write_shards(rows, tmp_path / "out", format="llava")
    with pytest.raises(DataError, match="holds shards already"):
        write_shards(rows, tmp_path / "out", format="llava")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "missing.png"}, "cannot be read"),
        ({"image": "rows.json"}, "neither JPEG, PNG nor WebP"),
        ({"image": []}, "mentions 1 images, the sample has 0"),
        ({"conversations": [{"from": "human", "value": "<image>"}]}, "nothing to learn"),
    ],
)
def test_a_row_that_cannot_be_written_is_named_and_leaves_no_half_shard(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = source(tmp_path / "raw")
    rows = json.loads(path.read_text())
    rows[3] |= change
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=rf"{message}.*rows\.json row 4"):
        write_shards(path, tmp_path / "out", format="llava")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_unknown_format_and_an_empty_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="Use one of folder, llava, messages, text"):
        write_shards(tmp_path, tmp_path / "out", format="csv")
    with pytest.raises(DataError, match="no record"):
        write_shards(tmp_path / "empty.jsonl", tmp_path / "out", format="text")
