# SPDX-License-Identifier: Apache-2.0
"""Directories that do not fit are refused before anything is written."""

import pytest
import torch

from mindvl_merge import MergeConfig, MergeError, merge


def _merge(tmp_path, models, **values):
    return merge(MergeConfig(models=tuple(models), out=tmp_path / "out", **values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("language.norm"),
            r"1 tensors are in only one of the models, the first is language\.norm",
        ),
        (
            lambda tensors: tensors.update(extra=torch.zeros(1)),
            r"1 tensors are in only one of the models, the first is extra",
        ),
        (
            lambda tensors: tensors.update({"language.norm": torch.zeros(5)}),
            r"model\.safetensors: tensor language\.norm has shape \[5\], but \[4\] in",
        ),
        (
            lambda tensors: tensors.update({"language.norm": torch.zeros(4).half()}),
            r"stored as float16, but as float32",
        ),
    ],
)
def test_models_that_differ_are_refused_by_name(tmp_path, make_directory, random_tensors, change, message):
    other = random_tensors(1)
    change(other)
    models = [make_directory("a", random_tensors(0)), make_directory("b", other)]
    with pytest.raises(MergeError, match=message):
        _merge(tmp_path, models)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_prefix_that_names_nothing_is_refused(tmp_path, make_directory, random_tensors):
    with pytest.raises(MergeError, match=r"no tensor of .*starts with 'lnguage'.*language\., vision\."):
        _merge(tmp_path, [make_directory("a", random_tensors(0))], only=("lnguage",))


def test_an_output_on_an_input_is_refused(tmp_path, make_directory, random_tensors):
    model = make_directory("a", random_tensors(0))
    for out in (model, model / "inside", tmp_path):
        with pytest.raises(MergeError, match="overlaps the input"):
            merge(MergeConfig(models=(model,), out=out, overwrite=True))
    assert model.exists()


def test_an_existing_output_is_kept_unless_requested(tmp_path, make_directory, random_tensors):
    model = make_directory("a", random_tensors(0))
    _merge(tmp_path, [model])
    (tmp_path / "out" / "note").write_text("mine")
    with pytest.raises(MergeError, match="--force"):
        _merge(tmp_path, [model])
    assert (tmp_path / "out" / "note").exists()
    _merge(tmp_path, [model], overwrite=True)
    assert not (tmp_path / "out" / "note").exists()


def test_links_in_a_circle_give_one_sentence(tmp_path, make_directory, random_tensors):
    path, circle = make_directory("a", random_tensors(0)), tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(MergeError, match="circle: the directory does not exist"):
        merge(MergeConfig(models=(path, circle), out=tmp_path / "out"))
    with pytest.raises(MergeError, match="nothing was changed"):
        merge(MergeConfig(models=(path,), out=circle))
