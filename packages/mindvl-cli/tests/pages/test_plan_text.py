# SPDX-License-Identifier: Apache-2.0
"""Text of a plan: bars in proportion, layouts by short names, misses with what they lack."""

from typing import Any

from mindvl_cli.pages.plan_text import again, found, layout_name, measured

PARTS = ("parameters", "gradients", "optimizer", "inputs", "activations", "temporary", "base")
GIB = 1e9


def _memory(**parts: float) -> dict[str, Any]:
    memory = dict.fromkeys(PARTS, 0.0) | parts
    return memory | {
        "host": 0.0,
        "total": sum(memory.values()),
        "activations_by": {"head": memory["activations"] / 4, "decoder": 3 * memory["activations"] / 4},
    }


def _plan() -> dict[str, Any]:
    return {
        "parallel": {
            "tp_size": 2,
            "cp_size": 1,
            "pp_size": 2,
            "ep_size": 4,
            "virtual_stages": 2,
            "stage_layers": [1, 2, 3, 4],
            "spread_images": True,
        },
        "recompute": {"kind": "full", "layers": 3, "offload_layers": 0},
        "offload": True,
        "dp_size": 8,
        "microbatches": 16,
        "fullest": 1,
        "memory": [_memory(parameters=10 * GIB), _memory(parameters=20 * GIB, activations=20 * GIB)],
        "time": {"matmul": 1.5, "bubble": 0.5, "total": 2.0},
        "mfu": 0.4,
        "bubble": 0.25,
        "tokens_per_s_device": 1234.0,
    }


def _document(**changes: Any) -> dict[str, Any]:
    document = {
        "model": "m",
        "device": "910B2",
        "devices": 32,
        "seq_length": 8192,
        "global_batch_size": 128,
        "visual_limit": 4915,
        "token_pixels": 784,
        "trained": ["language"],
        "adapter": None,
        "limit": 60 * GIB,
        "fitting": 1,
        "too_large": 2,
        "refused": {"heads": 3},
        "plans": [_plan()],
        "misses": [_plan()],
        "room": [{"seq_length": 2048, "visual_tokens": 2048}, {"seq_length": 65536, "visual_tokens": None}],
        "largest_max_pixels": None,
        "days": [{"phase": "sft", "tokens": 12e9, "step_s": 2.0, "days": 1.5, "fits": False}],
    }
    return document | changes


def test_a_layout_has_a_short_name() -> None:
    assert layout_name(_plan()) == "tp2 pp2x2 ep4 dp8 spread"
    assert again(_plan()) == "full 3, offload"
    away = {"kind": "selective", "layers": None, "offload_layers": 2}
    assert again(_plan() | {"recompute": away, "offload": False}) == "selective, offload 2 layers"


def test_offloaded_activations_are_counted_in_host_memory() -> None:
    plan = _plan()
    assert "host memory" not in found(_document())
    plan["memory"][0]["host"] = 7 * GIB
    assert "offloaded activations need up to 7.0 GB of host memory for each device" in found(_document(plans=[plan]))


def test_bars_are_as_long_as_their_share_of_the_device() -> None:
    text = found(_document())
    first, second = (line for line in text.splitlines() if "|" in line)
    assert first.count("p") == 10 + first.partition("|")[0].count("p")
    assert "p" * 20 + "a" * 20 in second
    assert "layers 1+3" in first
    assert "of its activations: decoder 15.0 GB, head 5.0 GB" in text


def test_misses_room_and_days_are_written_in_words() -> None:
    text = found(_document())
    assert "needs 40.0 GB of 60.0 GB" in text
    assert "3 x heads" in text
    assert "does not fit" in text
    assert "1.5 days" in text
    assert "plan it with --phase" in text


def test_without_a_layout_only_the_failures_are_shown() -> None:
    text = found(_document(plans=[], room=[], days=[], fitting=0))
    assert "MFU" not in text
    assert "needs 40.0 GB" in text


def test_measured_bytes_stand_beside_predicted_ones() -> None:
    predicted = _memory(parameters=100e6, activations=5e6, temporary=5e6)
    seen = {"parameters": 100e6, "gradients": 0.0, "optimizer": 0.0, "inputs": 0.0, "activations": 0.0, "total": 100e6}
    text = measured({"device": "cpu", "microbatches": 1, "ranks": [{"predicted": predicted, "measured": seen}]})
    assert "activations 10.0 / 0.0" in text
    assert "+10.0 %" in text
