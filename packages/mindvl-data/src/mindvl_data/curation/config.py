# SPDX-License-Identifier: Apache-2.0
"""The configuration of a curation pipeline: inputs, steps with parameters, output and limits.

Comes before everything that runs a pipeline. mindvl_cli reads it from YAML; `StepConfig.parameters` is an instance of the
dataclass that the step registers.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindvl_data.curation.step import Step, find_step
from mindvl_data.errors import redact

InputFormat = Literal["shards", "webdataset", "parquet", "jsonl", "imagefolder", "pdf"]


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """One input of a pipeline.

    Attributes:
        path: File or directory; with format webdataset also any address of the webdataset library.
        format: `shards`, directory of shards of mindvl; `webdataset`, tar files; `parquet`, one file or a directory of
            them; `jsonl`, JSON lines with `text`, `messages`, `conversations`, or a caption and images; `imagefolder`,
            images with or without captions; `pdf`, PDF files, one document each.
        name: Name in the ids of the records; the name of the file or directory by default.
        image_root: Directory that image names in records are relative to; the directory of the file by default.
        allow_pipe: Allow `pipe:` addresses, which run a shell command.
    """

    path: str
    format: InputFormat
    name: str | None = None
    image_root: Path | None = None
    allow_pipe: bool = False

    @property
    def shown_name(self) -> str:
        """Name in ids and on the page."""
        return self.name or redact(self.path.rstrip("/")).rsplit("/", 1)[-1].split(".")[0] or "input"


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """One step and its parameters, an instance of the step's dataclass."""

    step: str
    parameters: Any

    @property
    def definition(self) -> Step:
        """The registered step."""
        return find_step(self.step)


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Limits of a worker process. A record over a limit goes to quarantine and the run continues.

    Attributes:
        seconds_per_record: Time of one step for one record; the worker is replaced when it is over.
        loading_s: Time for loading a model.
        memory_gib: Memory of one worker process.
        media_mib: Size of one image or document.
        batch_records: Greatest number of records that a step receives at once; the output does not depend on it.
    """

    seconds_per_record: float = 60.0
    loading_s: float = 600.0
    memory_gib: float = 8.0
    media_mib: int = 256
    batch_records: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name}: must be greater than 0, got {value}.")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What is written.

    Attributes:
        samples_per_shard: Samples in a shard.
        list_dropped: Write a line to dropped.jsonl for every dropped record.
    """

    samples_per_shard: int = 10_000
    list_dropped: bool = True

    def __post_init__(self) -> None:
        if self.samples_per_shard < 1:
            raise ValueError(f"samples_per_shard: must be at least 1, got {self.samples_per_shard}.")


@dataclass(frozen=True, kw_only=True)
class CurationConfig:
    """A pipeline.

    Attributes:
        name: Name of the data; written as `source` into each sample.
        seed: Seed of everything that is random.
        inputs: Inputs in order.
        steps: Steps in order.
        out: Directory for shards, page and lists.
    """

    name: str
    seed: int = 0
    inputs: tuple[InputConfig, ...]
    steps: tuple[StepConfig, ...]
    out: Path
    output: OutputConfig = field(default_factory=OutputConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
