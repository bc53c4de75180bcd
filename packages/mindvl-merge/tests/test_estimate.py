# SPDX-License-Identifier: Apache-2.0
"""The bytes of a merge are counted, its time is measured on demand, and nothing is left behind."""

import pytest

from mindvl_merge import MergeConfig, MergeError
from mindvl_merge.estimate import estimate


@pytest.mark.slow
def test_bytes_are_those_of_the_files(tmp_path, make_directory, random_tensors):
    models = tuple(make_directory(f"m{i}", random_tensors(i)) for i in range(3))
    found = estimate(MergeConfig(models=models, out=tmp_path / "out"), measure_above_bytes=10**6)
    assert found.as_dict() == {"read_bytes": 3 * 57 * 4, "written_bytes": 57 * 4}
    only = estimate(MergeConfig(models=models, out=tmp_path / "out", only=("vision.",)), measure_above_bytes=10**6)
    assert only.read_bytes == (57 + 2 * 25) * 4  # 24 + 1 values of the vision tensors are read from the others
    found = estimate(MergeConfig(models=models[:2], base=models[2], out=tmp_path / "out", method="ties"))
    assert found.read_bytes == 3 * 3 * 57 * 4  # two passes for the threshold, one to merge
    assert found.seconds is not None
    assert found.seconds > 0
    assert len(list(tmp_path.iterdir())) == 3


def test_models_that_do_not_fit_are_refused(tmp_path, make_directory, random_tensors):
    models = (make_directory("a", random_tensors(0)), tmp_path / "nowhere")
    with pytest.raises(MergeError, match="nowhere: the directory does not exist"):
        estimate(MergeConfig(models=models, out=tmp_path / "out"))
