# SPDX-License-Identifier: Apache-2.0
"""`mindvl recipe`: what it prints for people and for machines, the map to shards, and the document that quotes it."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mindvl_cli.commands.recipe import recipe
from mindvl_cli.failures import CliError
from mindvl_cli.load import ConfigError, load_section
from mindvl_data import DataError, SourceConfig

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "data-recipes.md"


def run(*arguments):
    environment = {"FORCE_COLOR": None, "TTY_COMPATIBLE": None}  # a terminal that is only claimed changes the layout
    return CliRunner(env=environment).invoke(recipe, [str(a) for a in arguments], catch_exceptions=False)


def run_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.fixture
def root(tmp_path):
    for name in ("wtq", "general-qa", "holidays"):
        (tmp_path / "shards" / name).mkdir(parents=True)
    return tmp_path / "shards"


def test_the_list_names_each_phase_with_its_size():
    rows = run_json("list")["recipes"]
    assert [(row["name"], row["sources"], row["samples"]) for row in rows] == [
        ("warmup", 37, 557_529_409),
        ("multitask", 328, 89_228_927),
        ("sft", 143, 6_210_645),
    ]
    assert "557,529,409" in run("list").stdout


def test_show_gives_shares_by_category_and_by_source():
    document = run_json("show", "warmup")
    shares = {row["name"]: row["share"] for row in document["categories"]}
    assert shares["OCR"] == pytest.approx(98_560_000 / 557_529_409)
    assert sum(shares.values()) == pytest.approx(1)
    first = document["sources"][0]
    assert (first["name"], first["samples"], first["printed_percent"]) == (
        "Caption-CN-Rawcaption",
        132_900_000,
        "21.92",
    )
    assert document["budgets"][0]["steps"] == {"8192": 256_000_000_000 // (8192 * 1024)}


def test_show_prints_the_largest_sources_first_or_all_in_the_order_of_the_paper():
    few = run("show", "multitask", "--top", "2").stdout
    assert few.index("HTMLZHQWEN") < few.index("News Webpages")
    assert "326 more sources" in few
    assert "HTMLENQWEN" not in few
    everything = run("show", "multitask", "--all").stdout
    assert everything.index("HTMLENGPT4o") < everything.index("HTMLZHQWEN")
    assert "more sources" not in everything
    assert re.search(r"Web2Code +Web2code +- +- +-", everything)


def test_the_audit_prints_both_figures_and_succeeds():
    result = run("audit", "sft")
    assert result.exit_code == 0
    assert re.search(r"samples of all rows +6,180,645 +6,210,645 +-30,000", result.stdout)
    assert "warmup" not in result.stdout


def test_the_audit_of_everything_adds_the_tokens_of_the_training():
    audits = {entry["recipe"]: entry for entry in run_json("audit")["audits"]}
    assert list(audits) == ["warmup", "multitask", "sft", "training"]
    (finding,) = audits["training"]["findings"]
    assert (finding["printed"], finding["recomputed"]) == ("106000000000", "108000000000")
    raven = next(f for f in audits["multitask"]["findings"] if f["what"].startswith("Cauldron/raven"))
    assert (raven["printed"], raven["recomputed"], raven["difference"]) == ("0.1091", "0.1101", "-0.0010")
    assert raven["last_digit_only"] is False


def test_mapped_sources_are_yaml_that_a_recipe_can_hold(root, tmp_path):
    mapping = tmp_path / "directories.yaml"
    mapping.write_text(f"General QA: {root / 'general-qa'}\nWTQ: s3://bucket/wtq\n")
    out = tmp_path / "new" / "sources.yaml"
    result = run("show", "multitask", "--map", mapping, "--renormalize", "--out", out)
    assert result.stdout == ""
    assert "2 of 328 sources" in result.stderr
    sources = load_section(out, "data.sources", tuple[SourceConfig, ...])
    assert [(source.name, source.path, source.weight) for source in sources] == [
        ("WTQ", "s3://bucket/wtq", 1679),
        ("General QA", root / "general-qa", 1_316_361),
    ]
    with pytest.raises(CliError, match="exists"):
        run("show", "multitask", "--map", mapping, "--renormalize", "--out", out)


def test_a_root_is_mapped_by_directory_names_and_what_is_missing_or_left_over_is_reported(root):
    result = run("show", "multitask", "--root", root, "--renormalize")
    assert [line for line in result.stdout.splitlines() if "name:" in line] == [
        "  - name: WTQ",
        "  - name: General QA",
    ]
    assert "missing: Cauldron/ai2d (directory cauldron-ai2d)" in result.stderr
    assert result.stderr.count("missing: ") == 326
    assert "not in the data mixture: directory holidays" in result.stderr


def test_a_missing_source_is_an_error_unless_the_rest_may_continue(root):
    with pytest.raises(DataError, match="326 of 328 sources have no directory"):
        run("show", "multitask", "--root", root)


def test_ones_own_count_makes_web2code_a_source(tmp_path):
    (tmp_path / "web2code").mkdir()
    arguments = ("show", "multitask", "--root", tmp_path, "--renormalize")
    with pytest.raises(DataError, match="no sample count"):
        run(*arguments)
    document = run_json(*arguments, "--samples", "Web2Code=1200", "--out", tmp_path / "sources.yaml")
    assert "weight: 1200" in (tmp_path / "sources.yaml").read_text()
    assert document["sources"] == [{"name": "Web2Code", "path": str(tmp_path / "web2code"), "weight": 1200}]
    assert len(document["missing"]) == 327


def test_a_mapping_that_is_no_mapping_is_refused_with_its_line(root, tmp_path):
    mapping = tmp_path / "directories.yaml"
    mapping.write_text("WTQ: 3\n")
    with pytest.raises(ConfigError, match=r"directories.yaml:1"):
        run("show", "multitask", "--map", mapping, "--renormalize")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--map", __file__, "--root", "."],
        ["--renormalize"],
        ["--out", "x"],
        ["--samples", "WTQ"],
        ["--samples", "WTQ=x"],
    ],
)
def test_wrong_usage_exits_with_two(arguments):
    assert run("show", "sft", *arguments).exit_code == 2


def test_the_document_quotes_what_the_commands_print():
    text = DOCUMENT.read_text(encoding="utf-8")
    quoted = re.findall(r"^```sh\nmindvl recipe ([^\n]*)\n```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [command.split()[0] for command, _ in quoted] == ["list", "show", "audit"]
    for command, shown in quoted:
        lines = [line.rstrip() for line in run(*command.split()).stdout.rstrip().splitlines()]
        assert lines == shown.rstrip().splitlines(), command


def test_the_document_states_no_figure_of_its_own():
    text = DOCUMENT.read_text(encoding="utf-8")
    # What the paper prints and what the recipe files set is quoted; tests/test_recipes.py reads the files.
    text = re.sub(r"^## Values from the paper.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\d[\d.,]*\d", prose) == []
