# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a run come from."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mindvl_model import MindVLModel, WeightError, parameters, set_up_device
from mindvl_model.hf.load import load_hf_directory
from mindvl_model.parameters import initialize
from mindvl_model.testing.tiny import smallest_config
from mindvl_train import CheckpointError, InitSection, RunConfig, run_training
from mindvl_train.resolved_run import resolve_run

MODEL = smallest_config(vocab_size=264)


@pytest.fixture
def build() -> Iterator[Callable[..., MindVLModel]]:
    from mindvl_train.parallel_state import process_groups
    from mindvl_train.weights import build_models

    with process_groups(set_up_device(), seed=0) as ranks:
        yield lambda config, **options: build_models(
            replace(resolve_run(config, 1), model=MODEL), ranks.device, **({"load_init": True} | options)
        )[0]


def save_qwen3(directory: Path) -> Qwen3ForCausalLM:
    language = MODEL.language
    published = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=language.vocab_size,
            hidden_size=language.hidden_size,
            intermediate_size=language.ffn_hidden_size,
            num_hidden_layers=language.num_layers,
            num_attention_heads=language.num_heads,
            num_key_value_heads=language.attention.num_kv_heads,
            head_dim=language.attention.head_dim,
        )
    )
    published.save_pretrained(directory)
    return published


def test_what_is_not_named_starts_at_random_from_the_seed(
    make_config: Callable[..., RunConfig], build: Callable[..., Any], tmp_path: Path
) -> None:
    published = save_qwen3(tmp_path / "qwen3")
    model = build(make_config(seed=4, init=InitSection(language=tmp_path / "qwen3")))
    assert torch.equal(model.language.embedding.word_embeddings.weight, published.model.embed_tokens.weight)
    fresh = build(make_config(), load_init=False)
    initialize(fresh, MODEL, 4)
    assert torch.equal(model.vision.patch_embed.weight, fresh.vision.patch_embed.weight)
    assert torch.equal(model.projector.fc1.weight, fresh.projector.fc1.weight)


def test_only_weights_that_are_not_loaded_are_drawn_and_all_are_those_of_drawing_first(
    make_config: Callable[..., RunConfig],
    build: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_qwen3(tmp_path / "qwen3")
    drawn: list[str] = []
    draw = parameters._normal

    def recorded(name: str, *rest: Any) -> torch.Tensor:
        drawn.append(name)
        return draw(name, *rest)

    monkeypatch.setattr(parameters, "_normal", recorded)
    model = build(make_config(seed=4, init=InitSection(language=tmp_path / "qwen3")))
    assert {name.split(".")[0] for name in drawn} == {"vision", "projector"}
    expected = build(make_config(), load_init=False)
    initialize(expected, MODEL, 4)
    load_hf_directory(expected, MODEL, tmp_path / "qwen3", ["language"], seed=4)
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], parameter) for name, parameter in expected.named_parameters())


@pytest.mark.slow
def test_no_weight_is_drawn_if_a_checkpoint_has_all(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_config(out=tmp_path / "before")
    first = run_training(before)

    def refuse(name: str, *rest: Any) -> torch.Tensor:
        raise AssertionError(f"{name} is drawn")

    monkeypatch.setattr(parameters, "_normal", refuse)
    run_training(make_config(phase="sft", out=tmp_path / "after", init=InitSection(checkpoint=first.checkpoint)))


@pytest.mark.slow
def test_a_weight_that_is_neither_drawn_nor_loaded_is_an_error(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_training(make_config(out=tmp_path / "before"))
    stored = MindVLModel.sharded_state_dict

    def without_the_projector(self: MindVLModel, *rest: Any, **options: Any) -> dict[str, Any]:
        return {name: one for name, one in stored(self, *rest, **options).items() if "projector.fc1.w" not in name}

    monkeypatch.setattr(MindVLModel, "sharded_state_dict", without_the_projector)
    config = make_config(out=tmp_path / "after", init=InitSection(checkpoint=first.checkpoint))
    with pytest.raises(CheckpointError, match=r"no value for 1 tensors of the model, such as projector\.fc1\.weight"):
        run_training(config)


def test_the_phase_freezes_what_it_does_not_train(
    make_config: Callable[..., RunConfig], build: Callable[..., Any]
) -> None:
    model = build(make_config(phase="warmup"))
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"projector"}
    assert {p.dtype for p in build(make_config(precision="bf16")).parameters()} == {torch.bfloat16}


def test_a_directory_without_the_part_is_refused(
    make_config: Callable[..., RunConfig], build: Callable[..., Any], tmp_path: Path
) -> None:
    save_qwen3(tmp_path / "qwen3")
    with pytest.raises(WeightError, match=r"tensors are missing: model\.visual"):
        build(make_config(init=InitSection(vision=tmp_path / "qwen3")))
