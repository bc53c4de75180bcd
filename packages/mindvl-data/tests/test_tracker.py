# SPDX-License-Identifier: Apache-2.0
"""Tracker: a state is refused by name when something changed, and the log says what was consumed."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataConfig, DataError, ImageConfig, Loader, PackingConfig, VideoConfig
from mindvl_data.tracker import ORDER_VERSION, STATE_VERSION, open_state, saved_order, seal_state

MakeConfig = Callable[..., DataConfig]

ORDER = {
    "step": 4,
    "derived": [30.0, 1.5, 400],
    "totals": {"samples": 29},
    "tokens_by_source": {"a": 900},
    "drawn_at": [[2, 7]],
    "owed": [0.0],
    "buffer": [[0, 2, 1, 5, 40, 16]],
    "window": [[1]],
    "drawn": {"a": 30},
    "dropped": {"a: too long": 1},
}


def state_after(config: DataConfig, packs: int = 4) -> dict[str, Any]:
    with Loader(config, global_batch_size=2, position_kind="rope") as loader:
        for _ in range(packs):
            next(loader)
        return loader.state_dict()


def restore(config: DataConfig, state: dict[str, Any], global_batch_size: int = 2) -> None:
    with Loader(config, global_batch_size=global_batch_size, position_kind="rope") as loader:
        loader.load_state_dict(state)


def write_tokenizer(source: Path, target: Path, change: Callable[[dict[str, Any]], None], file: str) -> Path:
    """A copy of a tokenizer directory with one of its JSON files changed."""
    shutil.copytree(source, target)
    document = json.loads((target / file).read_text())
    change(document)
    (target / file).write_text(json.dumps(document))
    return target


def test_a_state_is_small_json_and_does_not_name_directories(make_config: MakeConfig) -> None:
    text = json.dumps(state_after(make_config()))
    assert len(text) < 4000
    assert str(make_config().tokenizer) not in text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 9}, r"seed \(3 -> 9\)"),
        ({"text_share": 0.5}, r"text_share \(None -> 0.5\)"),
        ({"packing": PackingConfig(seq_length=128, buffer_size=16)}, r"packing.seq_length \(256 -> 128\)"),
        ({"shuffle_window": 40}, r"shuffle_window \(20 -> 40\)"),
        ({"weight_unit": "tokens"}, r"weight_unit \(samples -> tokens\)"),
        ({"video": VideoConfig(fps=1.0)}, "image and video processor"),
        ({"image": ImageConfig(max_pixels=56 * 56)}, "image and video processor"),
        ({"image": ImageConfig(jpeg_scaling=True)}, "image and video processor"),
    ],
)
def test_a_changed_recipe_or_processor_is_refused_by_name(
    make_config: MakeConfig, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(DataError, match=f"checkpoint: {name} changed since it was written"):
        restore(make_config(**changes), state_after(make_config()))


def test_another_number_of_packs_in_a_step_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(DataError, match=r"global_batch_size \(2 -> 4\) changed"):
        restore(make_config(), state_after(make_config()), global_batch_size=4)


def test_another_index_is_refused_by_the_name_of_its_source(
    make_config: MakeConfig, shard_directories: dict[str, Path]
) -> None:
    config = make_config()
    swapped = replace(config, sources=(replace(config.sources[0], path=shard_directories["text"]), config.sources[1]))
    with pytest.raises(DataError, match="index of images changed"):
        restore(swapped, state_after(config))


def test_speed_settings_and_moved_directories_may_change(
    make_config: MakeConfig, shard_directories: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config()
    moved = tmp_path / "elsewhere"
    moved.symlink_to(shard_directories["images"])
    elsewhere = replace(config, num_threads=0, prefetch_packs=3)
    elsewhere = replace(elsewhere, sources=(replace(config.sources[0], path=moved), config.sources[1]))
    restore(elsewhere, state_after(config))


def test_a_damaged_or_foreign_state_is_refused() -> None:
    sealed = seal_state(ORDER, {"recipe": "a"}, sources=["a"])
    assert open_state(sealed, {"recipe": "a"}, sources=["a"]).order == ORDER
    without = {name: value for name, value in sealed.items() if name != "checksum"}
    for damaged in (sealed | {"order": {"step": 2}}, sealed | {"checksum": ""}, without):
        with pytest.raises(DataError, match="checksum is wrong"):
            open_state(damaged, {"recipe": "a"}, sources=["a"])
    with pytest.raises(DataError, match=r"^runs/a/ledger\.json: the ledger state is damaged"):
        open_state(sealed | {"order": {"step": 2}}, {"recipe": "a"}, sources=["a"], where="runs/a/ledger.json")
    with pytest.raises(
        DataError, match=r"^checkpoint: the ledger state has version 2, .*reads version 3\. Resume with"
    ):
        open_state(sealed | {"version": 2}, {"recipe": "a"}, sources=["a"])


def test_a_window_of_large_steps_stays_small(make_config: MakeConfig) -> None:
    choose = random.Random(4)
    buffer = [
        [choose.randrange(9), 3, choose.randrange(500), choose.randrange(10_000), 900, 640] for _ in range(15_000)
    ]
    sealed = seal_state(ORDER | {"buffer": buffer}, {}, sources=["a"])
    assert len(json.dumps(sealed)) < 150_000
    assert saved_order(json.loads(json.dumps(sealed)))["buffer"] == buffer
    assert saved_order(seal_state(ORDER | {"buffer": []}, {}, sources=["a"]))["buffer"] == []


def test_tokenizer_and_template_are_refused_each_by_its_name(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    state = state_after(config)

    def drop_a_merge(document: dict[str, Any]) -> None:
        document["model"]["merges"].pop()

    other = write_tokenizer(config.tokenizer, tmp_path / "other", drop_a_merge, "tokenizer.json")
    with pytest.raises(DataError, match=r"^checkpoint: tokenizer changed since it was written"):
        restore(replace(config, tokenizer=other), state)
    shutil.copytree(config.tokenizer, tmp_path / "template")
    for file in (tmp_path / "template").glob("chat_template*"):
        file.write_text(file.read_text() + "\n")
    with pytest.raises(DataError, match=r"^checkpoint: chat template changed since it was written"):
        restore(replace(config, tokenizer=tmp_path / "template"), state)


def test_the_weight_of_a_source_is_refused_and_cannot_be_accepted(make_config: MakeConfig) -> None:
    config = make_config()
    heavier = replace(config, sources=(replace(config.sources[0], weight=2.0), config.sources[1]))
    with pytest.raises(DataError, match=r"settings of images \(weight=1.0 -> weight=2.0\) changed") as caught:
        restore(heavier, state_after(config))
    assert "--accept-data-change" not in str(caught.value)


NAMES = {"order version": str(ORDER_VERSION), "seed": "3", "settings of a": "weight=1.0", "index of a": "1234"}


def test_changed_data_can_be_accepted_by_somebody() -> None:
    sealed = seal_state(ORDER, NAMES, sources=["a"])
    with pytest.raises(DataError, match=r"index of a changed .* accept the changed data with --accept-data-change"):
        open_state(sealed, NAMES | {"index of a": "5678"}, sources=["a"])
    opened = open_state(sealed, NAMES | {"index of a": "5678"}, sources=["a"], accept_change="me@here")
    assert opened.changed == {"a": ("1234", "5678")}
    assert opened.other_data == {"a"}
    assert opened.order == ORDER | {"derived": None}  # other data ask for other figures


def test_sources_may_come_and_continuece_somebody_accepts_it() -> None:
    both = {**NAMES, "settings of b": "weight=1.0", "index of b": "77"}
    order = ORDER | {
        "drawn_at": [[2, 7], [0, 9]],
        "owed": [0.5, -0.5],
        "buffer": [[0, 2, 1, 5, 40, 16], [1, 0, 0, 3, 20, 0], [0, 2, 1, 6, 40, 16]],
        "window": [[2]],
        "drawn": {"a": 30, "b": 9},
    }
    sealed = seal_state(order, both, sources=["a", "b"])
    new = {"order version": str(ORDER_VERSION), "seed": "3"}
    for name, index in (("c", "99"), ("b", "77")):
        new |= {f"settings of {name}": "weight=1.0", f"index of {name}": index}
    with pytest.raises(DataError, match=r"^checkpoint: source a \(removed\), source c \(added\) changed since"):
        open_state(sealed, new, sources=["c", "b"])
    opened = open_state(sealed, new, sources=["c", "b"], accept_change="me@here")
    assert opened.changed == {"a": ("1234", None), "c": (None, "99")}
    assert opened.other_data == frozenset()
    assert opened.order == {
        "step": 4,
        "derived": None,
        "totals": {"samples": 29},
        "tokens_by_source": {"a": 900},
        "drawn_at": [[0, 0], [0, 9]],
        "owed": [0.25, -0.25],
        "buffer": [[1, 0, 0, 3, 20, 0]],
        "window": [],
        "drawn": {"a": 28, "b": 9},
        "dropped": {"a: too long": 1, "a: data changed": 2},
    }


def test_max_epochs_may_be_raised_once_somebody_accepts_it_and_the_source_continues_where_it_stands() -> None:
    capped = NAMES | {"settings of a": "weight=1.0 max_epochs=1"}
    sealed = seal_state(ORDER, capped, sources=["a"])
    for raised in ("weight=1.0 max_epochs=3", "weight=1.0"):
        now = NAMES | {"settings of a": raised}
        with pytest.raises(DataError, match=r"settings of a \(.*max_epochs=1 -> .*--accept-data-change"):
            open_state(sealed, now, sources=["a"])
        opened = open_state(sealed, now, sources=["a"], accept_change="me@here")
        assert (opened.order, opened.other_data) == (ORDER, frozenset())
        assert opened.changed == {"a": ("weight=1.0 max_epochs=1", raised)}
        both = open_state(sealed, now | {"index of a": "5678"}, sources=["a"], accept_change="me@here")
        assert both.other_data == {"a"}
    lowered = seal_state(ORDER, NAMES | {"settings of a": "weight=1.0 max_epochs=3"}, sources=["a"])
    for refused in ("weight=1.0 max_epochs=2", "weight=2.0 max_epochs=4", "max_epochs=99"):
        with pytest.raises(DataError, match="settings of a"):
            open_state(lowered, NAMES | {"settings of a": refused}, sources=["a"], accept_change="me@here")


@pytest.mark.parametrize("state", [None, [], "text", 3, {"version": STATE_VERSION}])
def test_what_is_no_state_at_all_is_refused(state: Any) -> None:
    with pytest.raises(DataError, match=r"^checkpoint: the ledger state"):
        open_state(state, NAMES, sources=["a"])


def test_another_order_of_sources_is_refused() -> None:
    both = {**NAMES, "settings of b": "weight=1.0", "index of b": "77"}
    order = ORDER | {"drawn_at": [[2, 7], [0, 0]], "owed": [0.0, 0.0]}
    with pytest.raises(DataError, match=r"order of sources \(a b -> b a\) changed"):
        open_state(seal_state(order, both, sources=["a", "b"]), both, sources=["b", "a"], accept_change="me@here")


def test_a_state_of_another_version_of_the_order_is_refused_with_both_versions() -> None:
    sealed = seal_state(ORDER, NAMES | {"order version": "5"}, sources=["a"])
    expected = rf"data order has version 5, and this mindvl-data computes version {ORDER_VERSION}.*start a new run"
    with pytest.raises(DataError, match=expected):
        open_state(sealed, NAMES, sources=["a"], accept_change="me@here")


@pytest.mark.parametrize("name", ["seed", "settings of a"])
def test_rules_are_never_accepted_even_beside_changed_data(name: str) -> None:
    sealed = seal_state(ORDER, NAMES, sources=["a"])
    with pytest.raises(DataError, match=rf"^checkpoint: {name} \(.* -> x\) changed"):
        open_state(sealed, NAMES | {name: "x", "index of a": "5678"}, sources=["a"], accept_change="me@here")
