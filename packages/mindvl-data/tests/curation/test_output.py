# SPDX-License-Identifier: Apache-2.0
"""Tests of mindvl_data.curation.output."""

import tarfile
from pathlib import Path

from mindvl_data.curation.engine.part_files import framed, records_path
from mindvl_data.curation.engine.parts import Part
from mindvl_data.curation.engine.tasks import Segment
from mindvl_data.curation.output import versions, write_shards_of_parts


def segment(directory: Path) -> Segment:
    """A segment with parts of 3, 0 and 4 samples; the content of sample n is the text n."""
    directory.mkdir()
    samples = iter(range(7))
    for part, count in enumerate((3, 0, 4)):
        records_path(directory, part).write_bytes(b"".join(framed(b"%d" % next(samples), ()) for _ in range(count)))
    return Segment(
        index=0, directory=directory, source=None, decisions=None, applied=None, steps=(), signed=None
    )  # fmt: skip


def contents(path: Path) -> list[bytes]:
    with tarfile.open(path) as tar:
        return [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]


def test_samples_of_all_parts_are_copied_in_order_and_complete_shards_are_kept(tmp_path: Path) -> None:
    last = segment(tmp_path / "last")
    parts = [Part(number=number, input=0, files=("x",)) for number in range(3)]
    out, reported = tmp_path / "out", []
    write_shards_of_parts(out, last, parts, (3, 0, 4), 2, lambda done, total: reported.append((done, total)))

    assert [contents(path) for path in sorted(out.glob("*.tar"))] == [[b"0", b"1"], [b"2", b"3"], [b"4", b"5"], [b"6"]]
    assert reported == [(2, 7), (4, 7), (6, 7), (7, 7)]
    assert not (out / "writing").exists()

    (out / "shard-000002.tar").unlink()
    (out / "shard-000003.tar").unlink()
    times = [(out / f"shard-00000{number}.tar").stat().st_mtime_ns for number in (0, 1)]
    write_shards_of_parts(out, last, parts, (3, 0, 4), 2, lambda done, total: None)
    assert [contents(path) for path in sorted(out.glob("*.tar"))][2:] == [[b"4", b"5"], [b"6"]]
    assert [(out / f"shard-00000{number}.tar").stat().st_mtime_ns for number in (0, 1)] == times


def test_versions_name_the_installed_libraries() -> None:
    assert {"python", "mindvl-data", "numpy", "faiss-cpu"} <= versions().keys()
