# SPDX-License-Identifier: Apache-2.0
"""After the registration a MindVL directory loads without its remote code, which is refused before it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindvl_model.hf.export import export_hf_directory
from mindvl_model.hf.processor_files import ProcessorSettings
from mindvl_model.testing.tiny import smallest_config

# In a process of its own, because the registration holds for the whole process.
LOAD = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor
from mindvl_model.hf.registration import register_mindvl
directory = sys.argv[1]
try:
    AutoConfig.from_pretrained(directory, trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code" in str(error))
register_mindvl()
register_mindvl()
for auto_class in (AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor):
    print(type(auto_class.from_pretrained(directory, trust_remote_code=False)).__module__)
"""


def test_a_directory_loads_without_its_remote_code(
    make_model: Callable[..., Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    config, directory = smallest_config(vocab_size=270), tmp_path / "mindvl"
    settings = ProcessorSettings(min_pixels=784, max_pixels=7840)
    export_hf_directory(make_model(config), config, directory, tokenizer=tokenizer_directory, processor=settings)
    done = subprocess.run([sys.executable, "-c", LOAD, directory], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "True",
        "mindvl_model.hf.configuration_mindvl",
        "mindvl_model.hf.modeling_mindvl",
        "mindvl_model.hf.modeling_mindvl",
        "mindvl_model.hf.processing_mindvl",
    ]
