# SPDX-License-Identifier: Apache-2.0
"""MindVLModel: embed, put visual tokens at their placeholders, run the language model, sum the loss.

Comes after the batch (its names are the arguments), before the optimizer step.
"""

import torch
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.errors import ModelError
from mindvl_model.language.base import LanguageAdapter
from mindvl_model.language.deepseek_v3 import DeepSeekV3Adapter
from mindvl_model.language.qwen2 import Qwen2Adapter
from mindvl_model.language.qwen3 import Qwen3Adapter
from mindvl_model.language.qwen3_moe import Qwen3MoEAdapter
from mindvl_model.megatron.blocks import Layout, MegatronModule, PackedRow, mark_split_weights
from mindvl_model.megatron.router import RouterStatistics, finish_router_step, router_statistics
from mindvl_model.projector import Projector
from mindvl_model.vision.positions import plan_vision
from mindvl_model.vision.tower import VisionTower
from mindvl_ops import Segments

IGNORE_INDEX = -100

ADAPTERS: dict[str, LanguageAdapter] = {
    "qwen2": Qwen2Adapter(),
    "qwen3": Qwen3Adapter(),
    "qwen3_moe": Qwen3MoEAdapter(),
    "deepseek_v3": DeepSeekV3Adapter(),
}


class MindVLModel(MegatronModule):
    """Vision tower and projector on the first pipeline stage, the language model over all stages."""

    def __init__(
        self,
        config: MindVLConfig,
        layout: Layout,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        self.adapter = ADAPTERS[config.language.kind]
        language = self.adapter.build(
            config.language, layout, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
        super().__init__(config=language.config)
        self.mindvl = config
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.model_type = language.model_type
        self.share_embeddings_and_output_weights = config.language.tie_embeddings
        self.vision = VisionTower(config.vision, layout) if pre_process else None
        self.projector = Projector(config.vision, config.language.hidden_size, layout) if pre_process else None
        self.language = language
        mark_split_weights(self)

    def forward(
        self,
        *,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
    ) -> Tensor:
        """Summed loss of one packed row (scalar float32); hidden states [T, 1, H] on all but the last stage.

        Runs on the device of input_ids. cu_seqlens and the grids are read on the host: give them there, as the loader's
        batches do, because a copy back from the device makes the host wait.

        Args:
            input_ids, labels: [T]; labels are shifted already, -100 is not learned.
            position_ids: [3, T], counted inside each segment.
            cu_seqlens: [num_segments + 1], first entry 0.
            pixel_values: uint8 [P, C*patch*patch], all images end to end.
            image_grid_thw: [num_images, 3] patches along time, height, width.
            pixel_values_videos: uint8 [P_videos, C*temporal_patch*patch*patch], all videos end to end.
            video_grid_thw: [num_videos, 3].
        """
        hidden = self._run(
            input_ids,
            labels,
            position_ids,
            cu_seqlens,
            pixel_values,
            image_grid_thw,
            pixel_values_videos,
            video_grid_thw,
        )
        return hidden.sum(dtype=torch.float32) if self.post_process else hidden

    def logits(self, **inputs: Tensor) -> Tensor:
        """Logits [T, V] of one packed row; takes what forward takes, labels are ignored. Whole models only."""
        inputs.pop("max_seqlen", None)
        inputs["labels"] = None  # type: ignore[assignment]
        return self._run(**inputs).squeeze(0)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Activations of the previous pipeline stage (called by megatron-core's schedules)."""
        tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.language.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The tied embedding matrix (asked for by megatron-core when gradients of both ends are summed)."""
        return self.language.shared_embedding_or_output_weight()

    def finish_router_step(self) -> None:
        """End a step for the routers: sum its counts over all ranks, move balancing biases, keep the statistics.

        Call it once after every optimizer step, on every rank and for every virtual stage; one small collective.
        """
        finish_router_step(self)

    def router_statistics(self) -> list[RouterStatistics]:
        """How each layer with experts on this stage routed during the last finished step; empty without experts."""
        return router_statistics(self)

    def take_mtp_loss(self) -> Tensor | None:
        """Sum of losses and labels [depths, 2] of multi-token prediction on this rank since the last call, or None."""
        return self.language.take_mtp_loss()

    def _run(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
    ) -> Tensor:
        embeddings = None
        if self.pre_process:
            images, videos = self.encode_media(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
            embeddings = self._embed(input_ids, images, videos)
        cos, sin = self.adapter.rotary_angles(self.mindvl.language, position_ids)
        row = PackedRow(
            segments=Segments.from_cu_seqlens(cu_seqlens),
            cos=cos,
            sin=sin,
            input_ids=input_ids,
            is_token=input_ids != self.mindvl.tokens.pad,
            num_label_tokens=None if labels is None else (labels != IGNORE_INDEX).sum(),
        )
        return self.language(
            None,
            None,
            None,
            decoder_input=embeddings,
            labels=labels.unsqueeze(0) if labels is not None else None,
            packed_seq_params=row,
        )

    def _embed(self, input_ids: Tensor, images: Tensor, videos: Tensor) -> Tensor:
        """Token embeddings with visual tokens in place, [T, 1, H] ([T/tp, 1, H] with sequence parallel)."""
        embeddings = self.language.embedding(input_ids=input_ids.unsqueeze(0), position_ids=None).squeeze(1)  # [T, H]
        tokens = self.mindvl.tokens
        for kind, placeholder, visual_tokens in (("image", tokens.image, images), ("video", tokens.video, videos)):
            if placeholder is None:
                if len(visual_tokens):
                    raise ModelError("batch: a video, but the model has no tokens.video. Set it, or use images.")
                continue
            places = (input_ids == placeholder).nonzero().squeeze(1)
            if len(places) != len(visual_tokens):
                raise ModelError(
                    f"batch: {len(places)} {kind} placeholders, but the {kind}s give {len(visual_tokens)} visual "
                    f"tokens. The row was packed with other {kind} settings than the model's, or {kind}s are missing."
                )
            embeddings = embeddings.index_copy(0, places, visual_tokens.to(embeddings.dtype))
        return self.language.scatter(embeddings.unsqueeze(1))

    def encode_media(
        self,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Visual tokens [G_images, H] and [G_videos, H], each in input order."""
        assert self.vision is not None
        assert self.projector is not None
        vision = self.mindvl.vision
        images = [tuple(grid) for grid in image_grid_thw.tolist()]
        videos = [] if video_grid_thw is None else [tuple(grid) for grid in video_grid_thw.tolist()]
        num_images = sum(t * h * w for t, h, w in images) // vision.spatial_merge_size**2
        grids = images + videos
        if not grids:
            # Every rank must reach every collective, with media or without: a blank picture, of which nothing is used.
            side = vision.spatial_merge_size
            grids, pixel_values = [(1, side, side)], pixel_values.new_zeros(side**2, pixel_values.shape[-1])
        plan = plan_vision(grids, vision)
        visual_tokens = self.projector(self.vision(pixel_values, plan, pixel_values_videos))
        if plan.restore is not None:
            visual_tokens = visual_tokens[plan.restore.to(visual_tokens.device)]
        num_videos = sum(t * h * w for t, h, w in videos) // vision.spatial_merge_size**2
        return visual_tokens[:num_images], visual_tokens[num_images : num_images + num_videos]
