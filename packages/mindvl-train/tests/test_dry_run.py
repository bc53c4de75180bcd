# SPDX-License-Identifier: Apache-2.0
"""A dry run reports what the run does, and writes nothing."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mindvl_model import ModelError
from mindvl_model.parallel_config import ParallelConfig
from mindvl_model.testing.tiny import smallest_deepseek_v3
from mindvl_ops import OpsConfig
from mindvl_train import CheckpointConfig, ModelSection, RunConfig, TrainError, run_training
from mindvl_train.dry_run import _why_unwritable, dry_run
from mindvl_train.layout_search.measure import job_of, predict


@pytest.mark.slow
def test_it_says_what_the_run_then_does(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(steps=4, phase="warmup", checkpoints=CheckpointConfig(every_steps=3, keep_last=1))
    report = dry_run(config)
    assert not config.out.exists()
    assert report.problems == ()
    result = run_training(config)
    tensors = list((result.checkpoint / "tensors").iterdir())
    size = sum(path.stat().st_size for path in tensors)
    # Frozen parts have no moments. The list of tensors and file headers come on top, much in so small a model.
    assert report.checkpoints["bytes"] < size < report.checkpoints["bytes"] + 200_000
    assert (report.checkpoints["written"], report.checkpoints["at_once"]) == (2, 2)
    assert set(report.model["trained"]) == {"projector"}
    assert report.stages[0].parameters == sum(report.model["parameters"].values())
    assert report.stages[0].trained == report.model["trained"]["projector"]
    assert dry_run(config).start["resumes"] == str(result.checkpoint)


def test_stages_of_a_pipeline_hold_every_parameter_once(make_config: Callable[..., RunConfig]) -> None:
    model = smallest_deepseek_v3(vocab_size=264)
    section = ModelSection(vision=model.vision, language=model.language)
    whole = dry_run(make_config(model=section))
    config = make_config(model=section, global_batch_size=8, parallel=ParallelConfig(pp_size=3, ep_size=2))
    report = dry_run(config, num_processes=12)
    layout = report.layout
    assert (layout["dp_size"], layout["microbatches"], layout["pipeline_bubble"]) == (4, 2, 0.5)
    assert layout["groups_of_rank_0"] == {"tp": [0], "cp": [0], "ep": [0, 1], "dp": [0, 1, 2, 3], "pp": [0, 4, 8]}
    assert [stage.rank for stage in report.stages] == [0, 4, 8]
    assert [stage.has_vision for stage in report.stages] == [True, False, False]
    assert [stage.has_head for stage in report.stages] == [False, False, True]
    # Each stage holds half of its experts; the last one has a copy of the embedding for the token after the next.
    language = model.language
    assert language.experts is not None
    experts = 3 * language.hidden_size * language.experts.expert_ffn_hidden_size * language.experts.num_experts
    copies = 3 * experts // 2 - language.vocab_size * language.hidden_size
    assert sum(stage.parameters for stage in report.stages) + copies == whole.stages[0].parameters


def test_more_data_parallel_ranks_than_are_balanced_are_a_warning(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(global_batch_size=16)
    assert dry_run(config, num_processes=8).warnings == ()  # balance_width is 8
    (warning,) = dry_run(config, num_processes=16).warnings
    assert warning.startswith("data.packing.balance_width: 8 is less than the data-parallel size 16: the rank with")
    packing = replace(config.data.packing, balance_width=16)
    wider = replace(config, data=replace(config.data, packing=packing))
    assert dry_run(wider, num_processes=16).warnings == ()


def test_what_is_missing_is_listed_and_what_a_stage_will_write_is_not(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    gone = replace(config, data=replace(config.data, tokenizer=tmp_path / "gone"))
    gone = replace(gone, init=replace(gone.init, checkpoint=tmp_path / "earlier"))
    keys = [problem.partition(":")[0] for problem in dry_run(gone).problems]
    assert keys == ["data.tokenizer", "init.checkpoint"]
    later = dry_run(gone, from_stage="earlier")
    assert [problem.partition(":")[0] for problem in later.problems] == ["data.tokenizer"]
    assert later.data is None


def test_a_layout_that_does_not_fit_is_refused(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(TrainError, match="does not divide 3 processes"):
        dry_run(make_config(parallel=ParallelConfig(tp_size=2)), num_processes=3)
    with pytest.raises((TrainError, ModelError), match="tp_size=3"):
        dry_run(make_config(parallel=ParallelConfig(tp_size=3)))


def test_operators_that_cannot_run_here_are_a_problem_and_everything_else_is_reported(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindvl_ops.npu.extension.why_not", lambda: "torch_npu finds no NPU device")
    config = make_config(ops=OpsConfig(backend="torch"))
    here, there = dry_run(config), dry_run(replace(config, ops=OpsConfig(backend="npu")))
    (problem,) = there.problems
    assert problem.startswith("ops: backend npu: torch_npu finds no NPU device.")
    assert set(there.operators.values()) == {there.layout["device"]} == {"npu"}
    assert there.data == here.data is not None
    (on_npu,) = predict(job_of(config, 1), "npu")
    expected = round(on_npu.activations + on_npu.temporary + on_npu.inputs)
    assert there.stages[0].activation_bytes == expected != here.stages[0].activation_bytes


def test_a_directory_without_a_tokenizer_is_one_sentence_with_its_key(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    (problem,) = dry_run(replace(config, data=replace(config.data, tokenizer=tmp_path))).problems
    assert problem.startswith(f"data.tokenizer: {tmp_path} has no tokenizer.")
    assert len(problem.splitlines()) == 1


def test_a_log_that_exists_counts_by_itself_and_not_by_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    null = Path("/dev/null")
    monkeypatch.setattr(os, "access", lambda path, mode: path == null)
    assert _why_unwritable(null, is_file=True) is None
    assert _why_unwritable(null.with_name("no-such-log"), is_file=True) == "no write permission for /dev"
