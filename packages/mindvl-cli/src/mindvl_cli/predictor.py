# SPDX-License-Identifier: Apache-2.0
"""Make the Predictor of mindvl_merge.evaluation with the image decoder of training and the loader of model directories.

Called by `mindvl eval`, `mindvl search-resolution` and the demo.
"""

from pathlib import Path
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import PredictConfig, Predictor


class TrainingDecoder:
    """The image functions of mindvl_data as evaluation expects them."""

    def read_size(self, content: bytes) -> tuple[int, int]:
        """Height and width as shown, from the header."""
        from mindvl_data import ImageConfig, SampleError
        from mindvl_data.images import read_size

        try:
            return read_size(content, decode_limit=ImageConfig().decode_limit)
        except SampleError as error:
            raise EvaluationError(str(error)) from error

    def decode(self, content: bytes) -> Any:
        """Pixels uint8 `[height, width, 3]`."""
        from mindvl_data import ImageConfig, SampleError
        from mindvl_data.images import decode

        try:
            return decode(content, decode_limit=ImageConfig().decode_limit)
        except SampleError as error:
            raise EvaluationError(str(error)) from error

    def decode_scaled(self, content: bytes, size: tuple[int, int]) -> Any:
        """Pixels uint8 `[*size, 3]`, from a JPEG decoded at a fraction of its size where that is large enough."""
        from mindvl_data import ImageConfig, SampleError
        from mindvl_data.images import decode, resize

        try:
            return resize(decode(content, decode_limit=ImageConfig().decode_limit, at_least=size), *size)
        except SampleError as error:
            raise EvaluationError(str(error)) from error

    def resized(self, size: tuple[int, int], *, multiple: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """Size after resizing."""
        from mindvl_data import SampleError, smart_resize

        try:
            return smart_resize(*size, multiple=multiple, min_pixels=min_pixels, max_pixels=max_pixels)
        except SampleError as error:
            raise EvaluationError(str(error)) from error


DECODER = TrainingDecoder()  # one object: it is part of the key under which image sizes are cached


def make_predictor(
    directory: Path, *, config: PredictConfig, cache: Path | None, trust_remote_code: bool = False
) -> Predictor:
    """A predictor for a model directory; nothing is loaded yet.

    Args:
        cache: JSONL file of answers; None keeps them in memory.
        trust_remote_code: Run the Python files of the directory.
    """
    from mindvl_model.hf.pretrained import from_pretrained
    from mindvl_model.hf.vision_json import directory_kind
    from mindvl_model.vision.entries import DEFAULT_KIND, VISION_ENTRIES

    kind = directory_kind(directory) or DEFAULT_KIND
    return Predictor(
        directory,
        decoder=DECODER,
        load=from_pretrained,
        config=config,
        cache=cache,
        trust_remote_code=trust_remote_code,
        coordinates=VISION_ENTRIES[kind].coordinates,
    )
