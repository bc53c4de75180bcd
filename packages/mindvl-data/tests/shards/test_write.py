# SPDX-License-Identifier: Apache-2.0
"""Writing: the same bytes every time, pictures untouched, refusals by file and row."""

import json
from pathlib import Path

import pytest

from mindvl_data import DataError, index_folder, write_shards
from mindvl_data.shards.tar import scan_members
from mindvl_data.shards.write import WriteProgress


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
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["writing"]


def test_an_unknown_format_and_an_empty_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="Use one of folder, llava, messages, text"):
        write_shards(tmp_path, tmp_path / "out", format="csv")
    with pytest.raises(DataError, match="no record"):
        write_shards(tmp_path / "empty.jsonl", tmp_path / "out", format="text")


def stop_after(number: int) -> WriteProgress:
    """A progress callback that stops the write as a kill would: no clean-up of complete shards."""

    def progress(done: int, total: int) -> None:
        if done == number:
            raise KeyboardInterrupt

    return progress


def test_a_stopped_write_is_refused_by_the_index_and_starts_over(tmp_path: Path) -> None:
    rows, out = source(tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_shards(rows, out, format="llava", samples_per_shard=1, progress=stop_after(3))
    (out / ".shard-000002.tar.partial").write_bytes(b"left by a kill")
    with pytest.raises(DataError, match=r"not complete.*out/writing\. Write the folder again"):
        index_folder(out)
    assert write_shards(rows, out, format="llava", samples_per_shard=4) == 5
    assert sorted(path.name for path in out.iterdir()) == ["shard-000000.tar", "shard-000001.tar"]


def test_starting_over_removes_no_shard_of_another_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("writing", "mine.tar", "shard-000000.tar"):
        (out / name).write_bytes(b"")
    with pytest.raises(DataError, match="holds shards already"):
        write_shards(source(tmp_path / "raw"), out, format="llava")
    assert len(list(out.iterdir())) == 3


@pytest.mark.parametrize("change", [{"id": "a\ud800"}, {"split": ["b\udfff"]}])
def test_half_a_character_pair_is_refused_by_row(tmp_path: Path, change: dict[str, object]) -> None:
    path = source(tmp_path / "raw")
    rows = json.loads(path.read_text())
    rows[1] |= change
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"half of a character pair.*rows\.json row 2"):
        write_shards(path, tmp_path / "out", format="llava")
