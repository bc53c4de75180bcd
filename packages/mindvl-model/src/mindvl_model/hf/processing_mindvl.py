# SPDX-License-Identifier: Apache-2.0
"""Processor of an exported MindVL model: text, images and videos to model inputs; written next to the weights.

Imports only transformers. The image and video processors are those of the model of the vision encoder, which training
matches.
"""

from typing import Any

from transformers import ProcessorMixin
from transformers.processing_utils import MultiModalData
from transformers.utils import is_torchvision_available


class MindVLProcessor(ProcessorMixin):
    """Inserts one placeholder into the text for each visual token of an image or video."""

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
        # With the encoder of Qwen3-VL, the time of each temporal patch precedes its visual tokens.
        self.has_timestamps = type(video_processor).__name__ == "Qwen3VLVideoProcessor"
        if self.has_timestamps:
            self.videos_kwargs = {"return_metadata": True}
        super().__init__(**processors, chat_template=chat_template)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """Names of the parts of this processor; the video processor is left out without torchvision."""
        names: list[str] = super().get_attributes()
        return names if is_torchvision_available() else [name for name in names if name != "video_processor"]

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        """The placeholders of one image, one for each merge block of patches."""
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)

    def replace_video_token(self, video_inputs: Any, video_idx: int, **kwargs: Any) -> str:
        """The placeholders of one video, one for each merge block of patches."""
        time, height, width = video_inputs["video_grid_thw"][video_idx].tolist()
        of_patch = self.video_token * (height * width // self.video_processor.merge_size**2)
        if not self.has_timestamps:
            return of_patch * time
        times = self._times(video_inputs["video_metadata"][video_idx])
        return "".join(f"<{seconds:.1f} seconds><|vision_start|>{of_patch}<|vision_end|>" for seconds in times)

    def _times(self, metadata: Any) -> list[float]:
        """Mean time in seconds of the first and last frame of each temporal patch."""
        size = self.video_processor.temporal_patch_size
        frames, rate = [int(frame) for frame in metadata.frames_indices], metadata.fps or 24
        frames += frames[-1:] * (-len(frames) % size)
        return [(frames[at] / rate + frames[at + size - 1] / rate) / 2 for at in range(0, len(frames), size)]

    def _get_num_multimodal_tokens(
        self, image_sizes: Any = None, video_sizes: Any = None, **kwargs: Any
    ) -> MultiModalData:
        """Numbers of placeholders and patches without the media, which vLLM and SGLang ask for.

        Args:
            image_sizes: Height and width of each image.
            video_sizes: Frames, height and width of each video.
            kwargs: Options of the call of the processor.
        """
        valid: Any = self.valid_processor_kwargs  # a class, which transformers declares as its instance
        options = self._merge_kwargs(valid, **kwargs)
        counts = {}
        if image_sizes is not None:
            images = self.image_processor
            patches = [images.get_number_of_image_patches(*size, options["images_kwargs"]) for size in image_sizes]
            counts["num_image_patches"] = patches
            counts["num_image_tokens"] = [number // images.merge_size**2 for number in patches]
        if video_sizes is not None:
            videos = self.video_processor
            patches = [videos.get_num_of_video_patches(*size, options["videos_kwargs"]) for size in video_sizes]
            counts["num_video_tokens"] = [number // videos.merge_size**2 for number in patches]
        return MultiModalData(**counts)


__all__ = ["MindVLProcessor"]
