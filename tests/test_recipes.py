# SPDX-License-Identifier: Apache-2.0
"""Every recipe loads: unknown keys, wrong types and values that do not fit together are found before a run.

Those of the paper's models also say what the paper says.
"""

import json
from pathlib import Path

import pytest
import yaml

from mindvl_cli.curation_file import load_curation
from mindvl_cli.load import load_config, to_plain
from mindvl_cli.pipeline_file import is_pipeline, load_stages
from mindvl_data.curation.checks import check_steps
from mindvl_data.recipes import load_recipe
from mindvl_merge import MergeConfig
from mindvl_train import RunConfig
from mindvl_train.config import OptimizerConfig
from mindvl_train.phases import PipelineConfig

RECIPES = Path(__file__).parents[1] / "recipes"
CURATION = sorted((RECIPES / "curation").glob("*.yaml"))
FILES = sorted({*RECIPES.rglob("*.yaml")} - {*CURATION})
PIPELINES = [path for path in FILES if path.stem.startswith("pipeline")]
MODELS = ("mindvl-8b", "mindvl-671b-a37b")

# Table 1 by hand: (model, phase) -> tokens, global batch size, peak learning rate, minimum learning rate.
TABLE_1 = {
    ("mindvl-8b", "warmup"): (256e9, 1024, 1e-3, 0.0),
    ("mindvl-8b", "multitask"): (179e9, 1024, 2e-5, 1e-5),
    ("mindvl-8b", "sft"): (12e9, 512, 1e-5, 0.0),
    ("mindvl-671b-a37b", "warmup"): (16e9, 1024, 2e-4, 1e-5),
    ("mindvl-671b-a37b", "multitask"): (80e9, 1024, 5e-6, 5e-7),
    ("mindvl-671b-a37b", "sft"): (12e9, 512, 2e-6, 2e-7),
}
# Section 5.3: sequence length -> visual tokens of 28 x 28 pixels per image.
SFT_LENGTHS = {2048: 1280, 4096: 3072, 8192: 4096}


def _config_class(path: Path) -> type:
    if path.stem.startswith("merge"):
        return MergeConfig
    return PipelineConfig if is_pipeline(path) else RunConfig


def _name(path: Path) -> str:
    return path.relative_to(RECIPES).as_posix()


def test_there_are_recipes_for_every_phase() -> None:
    for model in ("tiny", *MODELS):
        assert {"warmup", "multitask", "sft", "merge", "pipeline"} <= {
            path.stem for path in (RECIPES / model).iterdir()
        }


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_every_recipe_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config: object = load_config(path, _config_class(path))
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(to_plain(config)), encoding="utf-8")  # JSON is YAML

    assert load_config(again, _config_class(path)) == config


@pytest.mark.parametrize("path", CURATION, ids=_name)
def test_every_curation_pipeline_loads_and_its_steps_find_what_they_need(path: Path) -> None:
    check_steps(load_curation(path))


@pytest.mark.parametrize("path", PIPELINES, ids=_name)
def test_every_stage_of_a_pipeline_starts_where_an_earlier_one_ends(path: Path) -> None:
    stages = load_stages(path)
    outs = {stage.name: stage.config.out for stage in stages}
    assert len(set(outs.values())) == len(stages)
    assert stages[0].start_from is None
    for stage in stages[1:]:
        assert stage.start_from is not None
        assert stage.config.init.checkpoint == outs[stage.start_from]


@pytest.mark.parametrize("model", MODELS)
def test_the_three_phases_are_those_of_table_1(model: str) -> None:
    stages = load_stages(RECIPES / model / "pipeline.yaml")
    assert [stage.config.phase for stage in stages] == ["warmup", "multitask", "sft", "sft", "sft"]
    for stage in stages:
        config, length = stage.config, stage.config.data.packing.seq_length
        tokens, batch_size, peak, low = TABLE_1[model, config.phase]
        schedule = config.schedule
        assert config.model.size == model
        assert config.global_batch_size == batch_size
        assert (schedule.peak_lr, schedule.min_lr, schedule.lr_warmup_ratio) == (peak, low, 0.1)
        assert 0 <= tokens - schedule.steps * batch_size * length < batch_size * length
        assert config.trained_parts == (
            ("projector",) if config.phase == "warmup" else ("vision", "projector", "language")
        )
    assert [stage.config.data.packing.seq_length for stage in stages] == [8192, 8192, 2048, 4096, 8192]
    for stage in stages[2:]:
        data = stage.config.data
        assert data.image.max_pixels == SFT_LENGTHS[data.packing.seq_length] * 28 * 28


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("phase", ["warmup", "multitask", "sft"])
def test_sources_weigh_what_the_paper_counts(model: str, phase: str) -> None:
    config = load_config(RECIPES / model / f"{phase}.yaml", RunConfig)
    counted = [count for count in load_recipe(phase).categories.values() if count]
    assert [source.weight for source in config.data.sources] == counted


def test_the_ablation_has_its_phases() -> None:
    trained = {
        name: [(stage.config.phase, stage.config.trained_parts) for stage in load_stages(RECIPES / "mindvl-8b" / name)]
        for name in ("pipeline-4phase.yaml", "pipeline-2phase.yaml", "pipeline-2phase-sft.yaml")
    }
    everything = ("vision", "projector", "language")
    warmup, multitask, sft = ("warmup", ("projector",)), ("multitask", everything), ("sft", everything)
    assert trained["pipeline-4phase.yaml"] == [warmup, ("warmup", ("vision", "projector")), multitask, sft, sft, sft]
    assert trained["pipeline-2phase.yaml"] == [warmup, multitask]
    assert trained["pipeline-2phase-sft.yaml"] == [warmup, sft, sft, sft]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("phase", ["warmup", "multitask", "sft"])
def test_recipes_say_what_the_paper_does_not_and_write_it_out(model: str, phase: str) -> None:
    path = RECIPES / model / f"{phase}.yaml"
    comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    paper, ours = comments.split("From the paper: ")[1].split("Not in the paper, ours: ")
    for word in ("what is trained", "tokens", "sequence length", "global_batch_size", "peak_lr", "min_lr", "Table 1"):
        assert word in paper
    for word in ("optimizer", "cosine", "min_pixels", "precision", "parallel"):
        assert word in ours
    assert ("max_pixels" in paper) == (phase == "sft")
    written = yaml.safe_load(path.read_text())["optimizer"]
    assert written == {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, "clip_grad_norm": 1.0}
    assert load_config(path, RunConfig).optimizer == OptimizerConfig()
    if phase == "multitask":
        assert "web2code" in path.read_text()
        assert "warm-up data" in path.read_text()


def test_the_published_moe_model_is_fine_tuned_at_4k_alone_and_merged_from_it() -> None:
    directory = RECIPES / "mindvl-671b-a37b"
    stages, all_lengths = load_stages(directory / "pipeline-4k.yaml"), load_stages(directory / "pipeline.yaml")
    assert [stage.name for stage in stages] == ["warmup", "multitask", "sft-4096"]
    assert stages[-1].config.data.packing.seq_length == 4096
    assert stages[-1].config.data.image.max_pixels == SFT_LENGTHS[4096] * 28 * 28
    by_name = {stage.name: stage.config for stage in all_lengths}
    assert all(stage.config == by_name[stage.name] for stage in stages)  # so either pipeline continues the other
    merge = load_config(directory / "merge.yaml", MergeConfig)
    assert str(merge.models[0]).endswith("-4k")
    assert "sft-4096" in (directory / "merge.yaml").read_text()


def test_sft_tokens_of_both_readings_are_written_down() -> None:
    thirds = [int(4e9 / (512 * length)) for length in SFT_LENGTHS]
    for path in (RECIPES / "mindvl-8b" / "pipeline.yaml", RECIPES / "mindvl-671b-a37b" / "pipeline.yaml"):
        text = " ".join(line.lstrip("# ") for line in path.read_text().splitlines())
        assert "without a scope" in text
        assert f"schedule.steps of {thirds[0]}, {thirds[1]} and {thirds[2]}" in text
