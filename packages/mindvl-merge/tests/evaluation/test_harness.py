# SPDX-License-Identifier: Apache-2.0
"""Figures of lm-eval are kept as they are; tests/commands/test_eval.py of mindvl-cli runs tasks with a real model."""

import sys
from types import SimpleNamespace

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import PredictConfig, run_tasks
from mindvl_merge.evaluation.harness import _figures


def test_errors_of_estimates_and_texts_are_no_figures():
    values = {
        "alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.1, "acc,none": 1,
        "acc_stderr,none": "N/A", "sample_len": 8,
    }  # fmt: skip
    assert _figures(values) == {"exact_match,strict-match": 0.25, "acc": 1.0}


def test_lm_eval_is_named_if_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EvaluationError, match=r"lm-eval:gsm8k: lm-eval is not installed\. .*mindvl-merge\[text\]"):
        run_tasks(None, "gsm8k")


def test_several_devices_are_refused():
    pytest.importorskip("lm_eval.models.huggingface")
    predictor = SimpleNamespace(config=PredictConfig(device="cpu,cpu"))
    with pytest.raises(EvaluationError, match="lm-eval:gsm8k: runs on one device, got --device cpu,cpu"):
        run_tasks(predictor, "gsm8k")
