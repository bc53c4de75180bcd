# SPDX-License-Identifier: Apache-2.0
"""Remote code of a model directory runs only if allowed; any other failure raises a ModelError."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from mindvl_model import ModelError
from mindvl_model.hf.pretrained import from_pretrained

CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, ProcessorMixin

Path({marker!r}).write_text("ran")


class Foreign(PreTrainedConfig):
    model_type = "foreign"


class ForeignProcessor(ProcessorMixin):
    pass
"""


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, Path]:
    """A directory with remote code that writes a file when it runs, and the path of that file."""
    directory, marker = tmp_path / "model", tmp_path / "marker"
    directory.mkdir()
    (directory / "foreign.py").write_text(CODE.format(marker=str(marker)))
    auto_map = {"AutoConfig": "foreign.Foreign", "AutoModelForImageTextToText": "foreign.Foreign"}
    (directory / "config.json").write_text(json.dumps({"model_type": "foreign", "auto_map": auto_map}))
    processor = {"processor_class": "ForeignProcessor", "auto_map": {"AutoProcessor": "foreign.ForeignProcessor"}}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory, marker


@pytest.mark.parametrize("auto_class", [AutoConfig, AutoProcessor, AutoModelForImageTextToText])
def test_code_of_a_directory_does_not_run_unless_allowed(foreign: tuple[Path, Path], auto_class: Any) -> None:
    directory, marker = foreign
    with pytest.raises(
        ModelError, match=r"model: .* the remote code of the directory \(foreign\.py\).*--trust-remote-code"
    ):
        from_pretrained(auto_class, directory)
    assert not marker.exists()


def test_code_of_a_directory_runs_when_allowed(foreign: tuple[Path, Path]) -> None:
    directory, marker = foreign
    assert from_pretrained(AutoConfig, directory, trust_remote_code=True).model_type == "foreign"
    assert marker.read_text() == "ran"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": 5}', '{"model_type": "qwen2", "vocab_size": []}'])
def test_a_damaged_directory_raises_a_model_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match="AutoModelForImageTextToText cannot load the directory") as caught:
        from_pretrained(AutoModelForImageTextToText, tmp_path)
    assert str(caught.value).isprintable()  # one line


def test_a_missing_library_is_named_with_the_remedy(foreign: tuple[Path, Path]) -> None:
    directory, _ = foreign
    (directory / "foreign.py").write_text('raise ImportError("Foreign requires the Torchvision library\\n")\n')
    with pytest.raises(ModelError, match=r"not installed: Foreign requires the Torchvision library\. Install it"):
        from_pretrained(AutoConfig, directory, trust_remote_code=True)
