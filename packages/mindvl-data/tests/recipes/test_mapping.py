# SPDX-License-Identifier: Apache-2.0
"""From the names of the paper to the user's directories."""

from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.recipes import find_directories, load_recipe, map_recipe, with_samples


@pytest.fixture
def recipe():
    return load_recipe("multitask")


def test_sources_weigh_what_the_paper_counts_in_the_order_of_the_paper(recipe, tmp_path):
    sources, missing = map_recipe(
        recipe, {"WTQ": tmp_path, "Math": tmp_path, "Wikiweb2m": str(tmp_path)}, renormalize=True
    )
    assert [(s.name, s.path, s.weight) for s in sources] == [
        ("Wikiweb2m", tmp_path, 2_000_000),
        ("WTQ", tmp_path, 1679),
        ("Math", tmp_path, 296_500),
    ]
    assert len(missing) == 325
    assert "Web2Code" in missing
    assert "WTQ" not in missing


def test_a_missing_source_is_refused_with_its_name_unless_the_rest_may_continue(tmp_path):
    recipe = load_recipe("warmup")
    mapping = {source.name: tmp_path for source in recipe.sources if source.name not in ("README", "HiVision")}
    with pytest.raises(DataError, match=r"2 of 37 sources have no directory: HiVision, README\."):
        map_recipe(recipe, mapping)
    sources, missing = map_recipe(recipe, mapping, renormalize=True)
    assert missing == ["HiVision", "README"]
    weights = {source.name: source.weight for source in sources}
    assert weights["Scene-OCR"] / weights["Table-Data"] == 1.7  # 17,000,000 to 10,000,000, as with all sources


def test_a_whole_mapping_has_nothing_missing(tmp_path):
    recipe = load_recipe("sft")
    sources, missing = map_recipe(recipe, {source.name: tmp_path for source in recipe.sources})
    assert missing == []
    assert sum(source.weight for source in sources) == 6_210_645


@pytest.mark.parametrize(
    ("name", "near"),
    [("WTQQ", "WTQ"), ("QwenCaps/Pixmo/cap-z", "QwenCaps/PixMo/cap-zh"), ("wtq", "WTQ"), ("general qa", "General QA")],
)
def test_an_unknown_name_is_refused_with_the_nearest(recipe, tmp_path, name, near):
    with pytest.raises(DataError, match=f"unknown source '{name}'.*nearest is '{near}'"):
        map_recipe(recipe, {name: tmp_path}, renormalize=True)


def test_a_directory_that_is_not_there_is_refused_but_an_address_is_not_looked_up(recipe, tmp_path):
    with pytest.raises(DataError, match=r"the directory '.*gone' of 'WTQ' does not exist"):
        map_recipe(recipe, {"WTQ": tmp_path / "gone"}, renormalize=True)
    (source,), _ = map_recipe(recipe, {"WTQ": "s3://bucket/wtq"}, renormalize=True)
    assert source.path == "s3://bucket/wtq"


def test_an_empty_mapping_is_no_mixture(recipe):
    with pytest.raises(DataError, match="no source has a directory"):
        map_recipe(recipe, {}, renormalize=True)


def test_a_source_without_a_printed_count_needs_the_users_own(recipe, tmp_path):
    with pytest.raises(DataError, match="prints no sample count for 'Web2Code'"):
        map_recipe(recipe, {"Web2Code": tmp_path}, renormalize=True)
    (source,), _ = map_recipe(with_samples(recipe, {"Web2Code": 1200}), {"Web2Code": tmp_path}, renormalize=True)
    assert source.weight == 1200


@pytest.mark.parametrize("counts", [{"Web2Code": 0}, {"Web2code": 5}])
def test_a_count_of_nothing_or_for_no_one_is_refused(recipe, counts):
    with pytest.raises(DataError):
        with_samples(recipe, counts)


def test_directories_below_a_root_are_found_by_their_plain_names(recipe, tmp_path):
    for name in ("qwencaps-pixmo-cap", "general-qa", "holidays"):
        (tmp_path / name).mkdir()
    (tmp_path / "wtq").write_text("a file, not a directory")
    assert find_directories(recipe, tmp_path) == {
        "QwenCaps/PixMo/cap": tmp_path / "qwencaps-pixmo-cap",
        "General QA": tmp_path / "general-qa",
    }


def test_a_root_without_any_source_is_refused_with_an_example(recipe, tmp_path):
    with pytest.raises(DataError, match="'htmlengpt4o' for 'HTMLENGPT4o'"):
        find_directories(recipe, tmp_path)
    with pytest.raises(DataError, match="the directory has no source of"):
        find_directories(recipe, Path("nowhere"))
