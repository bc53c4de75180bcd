# SPDX-License-Identifier: Apache-2.0
"""Tests of `mindvl data`: the four commands one after another, as a user meets them."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from click.testing import CliRunner, Result
from PIL import Image

from mindvl_cli.commands.data import data
from mindvl_cli.failures import CliError
from mindvl_data import DataError
from mindvl_data.formats.registry import FORMATS
from mindvl_model.hf.config_json import hf_config
from mindvl_model.testing.tiny import smallest_qwen3_vl
from mindvl_model.testing.tokenizer import save_tokenizer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(data, [str(a) for a in arguments], catch_exceptions=False)


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    rows = []
    for number in range(6):
        Image.new("RGB", (84, 56), (number * 40, 0, 0)).save(tmp_path / "raw" / f"{number}.png")
        turns = [
            {"from": "human", "value": "<image>\nWhere?"},
            {"from": "gpt", "value": f"At <box:0>, number {number}."},
        ]
        rows.append({"id": number, "image": f"{number}.png", "conversations": turns, "boxes": [[4, 4, 42, 28]]})
    (tmp_path / "raw" / "rows.json").write_text(json.dumps(rows))
    written = run_json("write", tmp_path / "raw" / "rows.json", "--format", "llava", "--out", tmp_path / "shards")
    assert written["samples"] == 6
    return tmp_path / "shards"


@pytest.fixture
def indexed(shards: Path) -> Path:
    assert run_json("index", shards)["directories"][0]["images"] == 6
    return shards


def test_writing_and_indexing_say_what_to_do_next(shards: Path, tokenizer: Path) -> None:
    result = run("index", shards, "--tokenizer", tokenizer)

    assert "6 samples, 6 images" in result.stdout
    assert list(shards.glob("*.len"))


def test_failed_records_and_samples_are_skipped_on_request_and_counted(shards: Path, tmp_path: Path) -> None:
    rows = tmp_path / "raw" / "rows.json"
    rows.write_text(json.dumps([*json.loads(rows.read_text()), {"conversations": 5}]))
    with pytest.raises(DataError, match=r"rows\.json row 7: the record needs a list `messages` or `conversations`"):
        run("write", rows, "--format", "llava", "--out", tmp_path / "strict", "--workers", 1)
    result = run("write", rows, "--format", "llava", "--out", tmp_path / "out", "--skip-bad", "--samples-per-shard", 4)
    assert "6 samples in" in result.stdout
    assert "1 records skipped, see" in result.stdout

    damaged = tmp_path / "out" / "shard-000001.tar"
    damaged.write_bytes(damaged.read_bytes()[:-1500])
    with pytest.raises(DataError, match=r"shard-000001\.tar at byte 3072: truncated shard"):
        run("index", tmp_path / "out")
    printed = run("index", tmp_path / "out", "--exclude-bad", "--decode").stdout
    assert "5 samples, 5 images; skipped: 1, see" in printed
    assert "shard-000001.tar: truncated shard: expected 147 bytes for member '000000005.0.png', got 36" in printed
    left_out = [json.loads(line) for line in (tmp_path / "out" / "excluded.jsonl").read_text().splitlines()]
    assert [line.get("row", line.get("key")) for line in left_out] == [7, "000000005"]


def test_a_stopped_write_resumes_or_starts_over(shards: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "raw" / "rows.json", tmp_path / "out"
    content = rows.read_text()
    (tmp_path / "raw" / "3.png").rename(tmp_path / "raw" / "away.png")
    arguments = ("write", rows, "--format", "llava", "--out", out, "--samples-per-shard", 2)
    with pytest.raises(DataError, match=r"3\.png cannot be read"):
        run(*arguments)
    (tmp_path / "raw" / "away.png").rename(tmp_path / "raw" / "3.png")
    assert run_json(*arguments) == {"out": str(out), "samples": 6, "excluded": 0}

    (tmp_path / "raw" / "5.png").unlink()
    arguments = (*arguments[:5], tmp_path / "again", *arguments[6:])
    with pytest.raises(DataError, match=r"5\.png cannot be read"):
        run(*arguments)
    rows.write_text(content + " ")
    with pytest.raises(DataError, match="the interrupted write cannot be resumed: source bytes was"):
        run(*arguments)
    assert run_json(*arguments, "--fresh", "--skip-bad")["excluded"] == 1


def test_a_sample_is_shown_at_each_stage(indexed: Path, tokenizer: Path) -> None:
    assert "Where?" in run("show", indexed, "--stage", "raw").stdout
    assert "assistant" in run("show", indexed).stdout
    tokens = run_json("show", indexed, "--key", "000000002", "--stage", "tokens", "--tokenizer", tokenizer)
    targets = "".join(run["text"] for run in tokens["tokens"] if run["in_loss"])
    assert targets == "At (4,4),(42,28), number 2.<|im_end|>"
    num_loss, total = (sum(t["count"] for t in tokens["tokens"] if t["in_loss"] or every) for every in (False, True))
    printed = run("show", indexed, "--key", "000000002", "--stage", "tokens", "--tokenizer", tokenizer).stdout
    assert printed.endswith(f"\n{num_loss} of {total} tokens are loss tokens:\n  {targets}\n")
    pack = run_json("show", indexed, "--stage", "pack", "--tokenizer", tokenizer)
    assert len(pack["segments"]) == 6


def test_a_model_directory_sets_the_sizes_of_images_and_the_unit_of_coordinates(indexed: Path, tokenizer: Path) -> None:
    """An image of 84 x 56 pixels: 3 x 2 visual tokens of 32 x 32; the box is in thousandths of its sides."""
    (tokenizer / "config.json").write_text(json.dumps(hf_config(smallest_qwen3_vl(), torch.float32)))
    tokens = run_json("show", indexed, "--key", "000000002", "--stage", "tokens", "--tokenizer", tokenizer)
    assert tokens["images"] == [{"size": [56, 84], "resized": [64, 96]}]
    assert sum(run["repeats"] for run in tokens["tokens"] if run["text"] == "<|image_pad|>") == 6
    targets = "".join(run["text"] for run in tokens["tokens"] if run["in_loss"])
    assert targets == "At (48,71),(500,500), number 2.<|im_end|>"
    assert run_json("show", indexed, "--stage", "pack", "--tokenizer", tokenizer)["patches"] == 6 * 24
    measured = run_json("index", indexed, "--tokenizer", tokenizer)["directories"][0]["text_tokens"]
    (tokenizer / "config.json").unlink()
    assert measured - run_json("index", indexed, "--tokenizer", tokenizer)["directories"][0]["text_tokens"] == 6 * 4


def test_a_page_holds_the_image_and_colours_the_loss_tokens(indexed: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    run("show", indexed, "--tokenizer", tokenizer, "--stage", "tokens", "--out", out)

    page = out.read_text()
    assert "data:image/png;base64," in page
    assert '<span class="t l">&lt;|im_end|&gt;</span>' in page
    assert "http" not in page


def test_stats_count_packs_sources_and_drops(indexed: Path, tokenizer: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: left alone\ndata:\n  tokenizer: {tokenizer}\n  packing: {{seq_length: 256}}\n"
        f"  sources:\n    - {{name: boxes, path: {indexed}}}\n"
    )
    figures = run_json("stats", recipe, "--packs", 20, "--dp", 2, "--microbatches", 2)
    assert figures["packs"] == 20
    assert figures["tokens_by_source"].keys() == {"boxes"}
    assert 0.7 < figures["packing_efficiency"] <= 1
    assert figures["rank_imbalance"] >= 0
    page = tmp_path / "stats.html"
    printed = run("stats", recipe, "--packs", 4, "--out", page, "data.packing.seq_length=128").stdout
    assert "packing efficiency" in printed
    assert "requested, samples" in printed
    root = ElementTree.fromstring(page.read_text().partition("<body>")[2].partition("</body>")[0].strip())
    assert len(list(root.iter("svg"))) == 2


def test_tokens_cannot_be_shown_without_a_tokenizer(indexed: Path) -> None:
    result = run("show", indexed, "--stage", "tokens")

    assert result.exit_code == 2
    assert "--tokenizer" in result.stderr


def test_every_format_of_the_package_can_be_named() -> None:
    choices = next(p.type for p in data.commands["write"].params if p.name == "format_name")  # type: ignore[attr-defined]

    assert list(choices.choices) == ["auto", *FORMATS]


def test_the_recognized_format_is_printed_with_its_reason(shards: Path, tmp_path: Path) -> None:
    result = run("write", tmp_path / "raw" / "rows.json", "--out", tmp_path / "again")
    assert "format llava: the first record has `conversations`" in result.stderr
    assert (tmp_path / "again/shard-000000.tar").is_file()


def test_an_unknown_key_is_named(indexed: Path) -> None:
    with pytest.raises(DataError, match="key 'missing' does not exist"):
        run("show", indexed, "--key", "missing")


@pytest.mark.parametrize(
    ("seq_length", "message"),
    [
        (100, r"--seq-length: must be a positive multiple of pad_multiple=8, got 100\. Use 96"),
        (8, r"shards: no sample fits into 8 tokens\. "),
    ],
)
def test_a_sequence_length_that_cannot_work_is_refused(
    indexed: Path, tokenizer: Path, seq_length: int, message: str
) -> None:
    with pytest.raises(CliError, match=message):
        run("show", indexed, "--stage", "pack", "--tokenizer", tokenizer, "--seq-length", seq_length)


def test_webdataset_addresses_are_written_and_commands_need_a_flag(tmp_path: Path) -> None:
    for number in range(2):
        with webdataset.TarWriter(str(tmp_path / f"a-{number}.tar")) as writer:
            writer.write({"__key__": f"k{number}", "txt": "a caption"})
    options = ("--format", "webdataset", "--out")
    assert run_json("write", f"{tmp_path}/a-{{0..1}}.tar", *options, tmp_path / "out")["samples"] == 2
    piped = ("write", f"pipe:cat {tmp_path}/a-0.tar", *options, tmp_path / "piped")
    with pytest.raises(DataError, match="--allow-pipe"):
        run(*piped)
    assert run_json(*piped, "--allow-pipe")["samples"] == 1
