# SPDX-License-Identifier: Apache-2.0
"""Processor of an exported MindVL model: text, images and videos to model inputs; stands beside the weights.

Imports transformers only. The image and video processors are transformers' own of Qwen2-VL, which training matches.
"""

from typing import Any

from transformers import ProcessorMixin
from transformers.utils import is_torchvision_available


class MindVLProcessor(ProcessorMixin):
    """Puts as many placeholders into the text as each image or video has visual tokens."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        chat_template: Any = None,
        **kwargs: Any,
    ) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        processors = {"image_processor": image_processor, "tokenizer": tokenizer}
        if "video_processor" in self.get_attributes():
            self.video_token = "<|video_pad|>"
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            processors["video_processor"] = video_processor
        super().__init__(**processors, chat_template=chat_template)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts of this processor; that for videos needs torchvision, the others do not."""
        names: list[str] = super().get_attributes()
        return names if is_torchvision_available() else [name for name in names if name != "video_processor"]

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        """The placeholders of one image: patches over the size of a merge block."""
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)

    def replace_video_token(self, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        """The placeholders of one video."""
        patches = int(video_inputs["video_grid_thw"][video_idx].prod())
        return self.video_token * (patches // self.video_processor.merge_size**2)


__all__ = ["MindVLProcessor"]
