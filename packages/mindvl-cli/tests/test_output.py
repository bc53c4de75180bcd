# SPDX-License-Identifier: Apache-2.0
"""What reaches a terminal or a log: no control characters of others, no secrets; our own colours stay."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import webdataset

from mindvl_cli.output import Guarded, escaped, message
from mindvl_data import index_directory

TITLE = "\x1b]0;owned\x07"


def test_control_characters_become_visible_and_text_stays() -> None:
    assert escaped(f"a{TITLE}\r\x9b2J\x7f") == r"a\x1b]0;owned\x07\x0d\x9b2J\x7f"
    assert escaped("gpj\u202egnp \u2028 \udc80") == r"gpj\u202egnp \u2028 \udc80"
    assert escaped("Gr\u00fc\u00dfe, \u4f60\u597d\tand\nmore \U0001f600") == (
        "Gr\u00fc\u00dfe, \u4f60\u597d\tand\nmore \U0001f600"
    )


def test_a_message_hides_secrets_too() -> None:
    assert message("s3://me:pa55@b/a\x1b[2J.tar") == r"s3://***@b/a\x1b[2J.tar"


@pytest.mark.parametrize(
    ("may_draw", "text", "shown"),
    [
        (False, "\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        (False, "\x1b[2K\r", r"\x1b[2K\x0d"),
        (True, "\x1b[2K\r\x1b[?25l", "\x1b[2K\r\x1b[?25l"),
        (True, TITLE, r"\x1b]0;owned\x07"),
    ],
)
def test_a_guarded_stream_lets_through_what_draws(may_draw: bool, text: str, shown: str) -> None:
    stream = io.StringIO()
    guarded = Guarded(stream, hides_secrets=True, may_draw=may_draw)
    assert guarded.write(text) == len(text)
    guarded.writelines(["http://u:pa55@h"])
    assert stream.getvalue() == shown + "http://***@h"
    assert not guarded.isatty()


@pytest.mark.slow
def test_names_of_others_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    directory.mkdir()
    with webdataset.TarWriter(str(directory / "a.tar")) as writer:
        writer.write({"__key__": f"k{TITLE}[/b]", "txt": f"caption {TITLE}"})
        writer.write({"__key__": f"bad{TITLE}", "json": {"url": TITLE}})

    def mindvl(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mindvl_cli.main", *words], capture_output=True, text=True, check=False
        )

    refused = mindvl("data", "index", str(directory))
    index_directory(directory, exclude_bad=True)
    shown = mindvl("data", "show", str(directory), "--stage", "sample")
    typed = mindvl("data", "show", f"s3://me:pa55word@b/{TITLE}")
    assert [each.returncode for each in (refused, shown, typed)] == [1, 0, 2]
    for each in (refused, shown, typed):
        assert "\x1b" not in each.stdout + each.stderr
        assert "\x07" not in each.stdout + each.stderr
        assert "Traceback" not in each.stderr
    assert r"\x1b]0;owned\x07" in refused.stderr
    assert r"\x1b]0;owned\x07" in shown.stdout
    assert "pa55word" not in typed.stderr
