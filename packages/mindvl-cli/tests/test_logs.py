# SPDX-License-Identifier: Apache-2.0
"""Tests of the logging set-up."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindvl_cli.logs import set_up_logging

logger = logging.getLogger("mindvl_train.made_up")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def test_rank_zero_warns_on_the_console_and_logs_all_to_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(rank=0, log_dir=tmp_path)
    logger.info("step %s", 1)
    logger.warning("bad sample")

    assert capsys.readouterr().err == "bad sample\n"
    assert "step 1" in (tmp_path / "rank-0000.log").read_text()


def test_other_ranks_write_to_their_file_and_only_errors_to_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(rank=3, log_dir=tmp_path)
    logger.info("quiet")
    logger.error("loud")

    assert capsys.readouterr().err == "loud\n"
    assert "quiet" in (tmp_path / "rank-0003.log").read_text()


def test_a_second_call_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging()
    set_up_logging()
    logger.warning("once")

    assert capsys.readouterr().err == "once\n"


def test_debug_lines_need_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging()
    logger.debug("hidden")
    set_up_logging(verbose=True)
    logger.debug("shown")

    assert capsys.readouterr().err == "shown\n"


def test_other_libraries_are_logged_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(verbose=True)
    logging.getLogger("some_library").info("chatter")
    logging.getLogger("some_library").warning("trouble")

    assert capsys.readouterr().err == "trouble\n"


def test_secrets_and_control_characters_reach_neither_console_nor_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging(log_dir=tmp_path)
    logging.getLogger("botocore").warning("retry of %s", "https://u:pa55@h/a\x1b]0;x\x07?sig=pa55")
    logger.warning("key %s", "a\n2026-01-01 INFO forged")
    try:
        raise OSError("https://u:pa55@h \x1b[2J")
    except OSError:
        logger.exception("failed")
    for text in (capsys.readouterr().err, (tmp_path / "rank-0000.log").read_text()):
        assert "pa55" not in text
        assert "\x1b" not in text
        assert r"https://***@h/a\x1b]0;x\x07?sig=***" in text
        assert r"OSError: https://***@h \x1b[2J" in text
        assert "\n    2026-01-01 INFO forged\n" in text


def test_a_log_on_a_full_disk_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0000.log").symlink_to("/dev/full")
    set_up_logging(rank=0, log_dir=tmp_path)
    logger.info("one")
    logger.info("two")
    logged = capsys.readouterr().err
    assert logged.endswith(
        "cannot be written (No space left on device). The command continues without this log; free space on the disk.\n"
    )
    assert len(logged.splitlines()) == 1
