# SPDX-License-Identifier: Apache-2.0
"""vLLM finds the plugin by its entry point, and importing the plugin imports neither vLLM nor torch."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from mindvl_model.hf import vllm_plugin
from mindvl_model.hf.config_json import hf_config
from mindvl_model.testing.tiny import smallest_config

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_entry_point_names_the_function_that_registers_the_model():
    group = "vllm.general_plugins"
    entries = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][group]
    assert EntryPoint(name="mindvl", value=entries["mindvl"], group=group).load() is vllm_plugin.register


def test_the_architecture_is_that_of_exported_directories():
    import torch

    assert hf_config(smallest_config(), torch.float32)["architectures"] == [vllm_plugin.ARCHITECTURE]


def test_vllm_is_imported_only_when_it_calls_the_plugin():
    code = "import sys, mindvl_model.hf.vllm_plugin; print({'vllm', 'transformers', 'megatron'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
