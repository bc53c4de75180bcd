# SPDX-License-Identifier: Apache-2.0
"""Processor of an exported MindVL model: text and pictures to model inputs; written beside the weights as remote code.

Imports transformers only. The image processor is transformers' own of Qwen2-VL, which training matches.
"""

from typing import Any

from transformers import ProcessorMixin


class MindVLProcessor(ProcessorMixin):
    """Puts as many placeholders into the text as each picture has visual tokens."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        """The placeholders of one picture: patches over the size of a merge block."""
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)


__all__ = ["MindVLProcessor"]
