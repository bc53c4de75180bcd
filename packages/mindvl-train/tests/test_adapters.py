# SPDX-License-Identifier: Apache-2.0
"""Runs that train adapters: what is trained and saved, resume, export to PEFT, initial adapters, and the base weights.

As a program this file is a run that is killed in a step.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from mindvl_data import SourceConfig
from mindvl_model.adapters import LoRAConfig
from mindvl_model.hf.pretrained import from_pretrained
from mindvl_model.testing.tiny import smallest_config, smallest_qwen3_moe
from mindvl_train import CheckpointConfig, ModelSection, RunConfig, run_training
from mindvl_train.adapters import base_digest
from mindvl_train.checkpoints.export import export_checkpoint
from mindvl_train.checkpoints.integrity import FILES, seal, write_json
from mindvl_train.checks.alignment import write_start
from mindvl_train.checks.parallel import check_parallel
from mindvl_train.config import InitSection
from mindvl_train.dry_run import dry_run
from mindvl_train.errors import CheckpointError, TrainError
from mindvl_train.validation.config import ValidationConfig

LORA = LoRAConfig(rank=4, alpha=8, dropout=0.1)


@pytest.fixture
def base(make_config: Callable[..., RunConfig], tmp_path: Path) -> Path:
    """A published model directory with the weights of a seed."""
    write_start(make_config("unused", seed=3), tmp_path / "base")
    return tmp_path / "base"


def checkpoint_of(config: RunConfig, step: int) -> Path:
    return config.out / "checkpoints" / f"step-{step:08d}"


def test_only_adapters_are_trained_and_saved(make_config: Any, base: Path, read_tensors: Any) -> None:
    config = make_config(adapter=LORA, init=InitSection(model=base))
    run_training(config)
    tensors = read_tensors(checkpoint_of(config, 6))
    assert tensors
    assert all(".lora." in name for name in tensors)
    weights = [name for name in tensors if not name.startswith("optimizer.")]
    assert all(tensors[name].any() for name in weights)  # B is no longer zero
    states = {name.removeprefix("optimizer.state.exp_avg.") for name in tensors if ".exp_avg." in name}
    assert states == set(weights)
    manifest = json.loads((checkpoint_of(config, 6) / "manifest.json").read_text())
    assert manifest["base"]["weights"] == {"model": {"path": str(base), "digest": base_digest(base)}}


def test_a_resumed_run_continues_bitwise_with_dropout(make_config: Any, base: Path, read_tensors: Any) -> None:
    whole = make_config("whole", adapter=LORA, init=InitSection(model=base))
    run_training(whole)
    again = make_config("again", adapter=LORA, init=InitSection(model=base))
    _without_a_new_field(checkpoint_of(whole, 3))
    run_training(again, resume=checkpoint_of(whole, 3))
    expected, found = (read_tensors(checkpoint_of(one, 6)) for one in (whole, again))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def _without_a_new_field(checkpoint: Path) -> None:
    """As if the checkpoint had been saved before the field `dora` existed."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["run"]["adapter"]["dora"]
    write_json(checkpoint / "manifest.json", manifest)
    (checkpoint / FILES).unlink()
    seal(checkpoint)


def test_norms_of_dora_start_at_those_of_the_weights_and_are_trained(
    make_config: Any, base: Path, tmp_path: Path, read_tensors: Any
) -> None:
    config = make_config(adapter=replace(LORA, dropout=0.0, dora=True, base_bits=4), init=InitSection(model=base))
    run_training(config)
    again = make_config("again", adapter=config.adapter, init=config.init)
    run_training(again, resume=checkpoint_of(config, 3))
    expected, found = (read_tensors(checkpoint_of(one, 6)) for one in (config, again))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    start = read_tensors(checkpoint_of(config, 3))
    norms = [name for name in expected if name.endswith(".M")]
    weights = load_file(base / "model.safetensors")
    (name,) = [one for one in norms if one.startswith("language") and "q_proj" in one]  # of all layers
    wanted = torch.linalg.vector_norm(weights["model.language_model.layers.1.self_attn.q_proj.weight"], dim=1)
    assert (start[name][1] - wanted).abs().max() < 0.1 * wanted.max()  # of quantized weights, after three steps
    assert not any(torch.equal(start[one], expected[one]) for one in norms if "optimizer" not in one)
    export_checkpoint(config.out, tmp_path / "adapter")
    model = from_pretrained(AutoModelForImageTextToText, base, trust_remote_code=True, dtype=torch.float32)
    assert PeftModel.from_pretrained(model, tmp_path / "adapter").peft_config["default"].use_dora


def test_a_run_over_four_bits_resumes_bitwise_and_exports_to_the_full_base(
    make_config: Any, base: Path, read_tensors: Any, tmp_path: Path
) -> None:
    lora, start = replace(LORA, base_bits=4), InitSection(model=base)
    whole = make_config("whole", adapter=lora, init=start)
    run_training(whole)
    again = make_config("again", adapter=lora, init=start)
    run_training(again, resume=checkpoint_of(whole, 3))
    full = make_config("full", adapter=LORA, init=start)
    run_training(full)
    expected, found, other = (read_tensors(checkpoint_of(one, 6)) for one in (whole, again, full))
    assert expected.keys() == found.keys() == other.keys()
    assert all(".lora." in name for name in expected)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not all(torch.equal(expected[name], other[name]) for name in expected)
    export_checkpoint(whole.out, tmp_path / "adapter")
    model = from_pretrained(AutoModelForImageTextToText, base, trust_remote_code=True, dtype=torch.float32)
    PeftModel.from_pretrained(model, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="adapter="):
        run_training(replace(again, adapter=LORA), resume=checkpoint_of(whole, 3))


def test_a_quantized_base_is_refused_on_npus_and_without_bitsandbytes(
    make_config: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(adapter=replace(LORA, base_bits=8), init=InitSection(model=base))
    assert dry_run(config).problems == ()
    on_npu = dry_run(replace(config, ops=replace(config.ops, backend="npu")))
    assert any("bitsandbytes has no kernels for NPUs" in problem for problem in on_npu.problems)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrainError, match=r"pip install 'mindvl-model\[quantized\]'"):
        run_training(config)


def test_a_checkpoint_of_adapters_is_refused_with_other_weights_below_them(
    make_config: Any, base: Path, tmp_path: Path
) -> None:
    config = make_config(adapter=LORA, init=InitSection(model=base))
    run_training(config)
    write_start(make_config("unused", seed=4), tmp_path / "other")
    changed = replace(config, out=tmp_path / "changed", init=InitSection(model=tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r"trained on init\.model=.*base \(digest .*but this run has .*other"):
        run_training(changed, resume=checkpoint_of(config, 3))
    other_rank = replace(config, out=tmp_path / "rank", adapter=replace(LORA, rank=8))
    with pytest.raises(CheckpointError, match="adapter="):
        run_training(other_rank, resume=checkpoint_of(config, 3))
    with pytest.raises(CheckpointError, match="stores adapters without the weights below them"):
        run_training(make_config("next", init=InitSection(checkpoint=config.out)))


def test_an_exported_run_loads_in_peft_and_starts_another_run(
    make_config: Any, base: Path, tmp_path: Path, read_tensors: Any
) -> None:
    config = make_config(adapter=replace(LORA, dropout=0.0), init=InitSection(model=base))
    run_training(config)
    export_checkpoint(config.out, tmp_path / "adapter")
    document = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert document["base_model_name_or_path"] == str(base)
    model = from_pretrained(AutoModelForImageTextToText, base, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        before = model(input_ids=torch.arange(20, 40)[None]).logits
        wrapped = PeftModel.from_pretrained(model, tmp_path / "adapter")
        assert (wrapped(input_ids=torch.arange(20, 40)[None]).logits - before).abs().max() > 1e-4
    again = make_config(
        "again", adapter=config.adapter, init=InitSection(model=base, adapter=tmp_path / "adapter"), steps=1
    )
    again = replace(again, schedule=replace(again.schedule, peak_lr=0.0, min_lr=0.0))
    run_training(again)
    expected, found = read_tensors(checkpoint_of(config, 6)), read_tensors(checkpoint_of(again, 1))
    weights = [name for name in expected if not name.startswith("optimizer.")]
    assert all(torch.equal(expected[name], found[name]) for name in weights)


def test_a_run_warns_of_embedding_rows_that_stay_random(
    make_config: Any, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wider = smallest_config(vocab_size=280)  # the base has 264 rows
    section = ModelSection(vision=wider.vision, language=wider.language)
    run_training(make_config(model=section, adapter=LORA, init=InitSection(model=base), steps=1))
    rows = [record.getMessage() for record in caplog.records if "the last 16 rows" in record.getMessage()]
    assert len(rows) == 2  # embedding and output layer
    assert all("Adapters neither train nor store them: add them to the base model first" in one for one in rows)


def test_a_digest_changes_with_the_values_of_a_file(base: Path) -> None:
    before = base_digest(base)
    assert base_digest(base) == before
    file = base / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert base_digest(base) != before


def test_initial_adapters_without_a_section_and_unknown_targets_are_refused(make_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"init\.adapter: is .*but the recipe has no section adapter"):
        make_config(init=InitSection(adapter=tmp_path))
    with pytest.raises(ValueError, match=r"adapter\.targets: 'qproj' matches no linear layer"):
        make_config(adapter=LoRAConfig(targets=("qproj",)))


@pytest.mark.slow
def test_a_killed_run_with_validation_stops_early_with_the_adapters_of_an_undisturbed_one(
    make_config: Any, base: Path, held_out: tuple[SourceConfig, ...], tmp_path: Path, read_tensors: Any
) -> None:
    runs = {}
    for name in ("straight", "killed"):
        runs[name] = make_config(
            name,
            steps=12,
            adapter=LORA,
            init=InitSection(model=base),
            validation=ValidationConfig(sources=held_out, every_steps=1, patience=4, min_delta=100.0),
            checkpoints=CheckpointConfig(every_steps=2, keep_last=1, async_save=False),
        )
    (tmp_path / "job").write_bytes(pickle.dumps((runs["killed"], 3)))
    done = subprocess.run([sys.executable, __file__, str(tmp_path / "job")], timeout=400, check=False)
    assert done.returncode == -signal.SIGKILL
    assert checkpoint_of(runs["killed"], 2).is_dir()
    ends = [run_training(config) for config in runs.values()]
    assert [end.checkpoint.name for end in ends] == ["step-00000005"] * 2  # no decrease of 100 in four validations
    losses = []
    for config in runs.values():
        lines = map(json.loads, (config.out / "validation.jsonl").read_text().splitlines())
        losses.append([(line["step"], line["loss"]) for line in lines])
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == [1, 2, 3, 4, 5]
    best = min(losses[0], key=lambda one: one[1])[0]
    for config in runs.values():
        held = {path.name for path in (config.out / "checkpoints").iterdir()}
        assert held == {"best", f"step-{best:08d}", "step-00000005"}
        assert (config.out / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    for step in {best, 5}:
        expected, found = (read_tensors(checkpoint_of(config, step)) for config in runs.values())
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    export_checkpoint(runs["killed"].out / "checkpoints" / "best", tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.multi
def test_runs_over_four_bits_in_parallel_layouts_equal_one_process(make_config: Any, tmp_path: Path) -> None:
    """With sizes of which each rank has whole blocks of 64 weights."""
    experts = smallest_qwen3_moe(vocab_size=264)
    language = replace(
        experts.language,
        hidden_size=64,
        ffn_hidden_size=128,
        attention=replace(experts.language.attention, head_dim=32),
        experts=replace(experts.language.experts, expert_ffn_hidden_size=64),
    )
    vision = replace(experts.vision, hidden_size=128, ffn_hidden_size=128)
    lora = replace(LORA, dropout=0.0, base_bits=4, double_quantization=False)
    config = make_config(model=ModelSection(vision=vision, language=language), adapter=lora)
    reports = check_parallel(config, ["tp2", "ep2", "tp2ep2"], tmp_path / "quantized", steps=2, num_cores=2)
    assert [(one.layout, one.holds, one.problem) for one in reports] == [
        (name, True, "") for name in ("tp2", "ep2", "tp2ep2")
    ]


@pytest.mark.slow
@pytest.mark.multi
def test_runs_in_parallel_layouts_equal_one_process(make_config: Any, tmp_path: Path) -> None:
    """Loss, gradient norm and gradients of real runs, with dropout, each in its own processes."""
    config = make_config(adapter=LORA)
    reports = check_parallel(config, ["pp2", "cp2"], tmp_path / "dense", steps=3, num_cores=2)
    experts = smallest_qwen3_moe(vocab_size=264)
    section = ModelSection(vision=experts.vision, language=experts.language)
    config = make_config(model=section, adapter=replace(LORA, dropout=0.0))
    reports += check_parallel(config, ["tp2ep2"], tmp_path / "experts", steps=2, num_cores=2)
    assert [(one.layout, one.holds, one.problem) for one in reports] == [
        (name, True, "") for name in ("pp2", "cp2", "tp2ep2")
    ]


def test_trained_parameters_are_those_of_the_adapters_everywhere(make_config: Any, base: Path) -> None:
    config = make_config(adapter=replace(LORA, targets=("q_proj", "down_proj")), init=InitSection(model=base), steps=1)
    run_training(config)
    language = 2 * 4 * ((24 + 32) + (40 + 24))  # two layers, rank 4: queries of 4 heads of 8; 40 in the MLP
    vision = 2 * 4 * (24 + 16)
    card = json.loads((config.out / "run.json").read_text())
    assert card["parameters"]["trained"] == language + vision
    assert card["adapter"]["rank"] == 4
    report = dry_run(config)
    assert report.model["trained"] == {"vision": vision, "projector": 0, "language": language}
    (stage,) = report.stages
    assert stage.trained == language + vision
    assert report.checkpoints["bytes"] == (4 + 8) * (language + vision)


def _killed(job: Path) -> None:
    config, last = pickle.loads(job.read_bytes())

    def kill(step: int, loss: float | None) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    run_training(config, on_step=kill)


if __name__ == "__main__":
    _killed(Path(sys.argv[1]))
