# SPDX-License-Identifier: Apache-2.0
"""MindVLModel: embed, put visual tokens at their placeholders, run the language model, sum the loss.

Comes after the batch (its names are the arguments), before the optimizer step.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.language.base import LanguageAdapter
from mindvl_model.language.deepseek_v3 import DeepSeekV3Adapter
from mindvl_model.language.qwen2 import Qwen2Adapter
from mindvl_model.language.qwen3 import Qwen3Adapter
from mindvl_model.language.qwen3_moe import Qwen3MoEAdapter
from mindvl_model.megatron.blocks import MegatronModule, PackedSequence, mark_split_weights
from mindvl_model.megatron.replicas import (
    context_rank,
    gather_parts,
    mark_whole,
    number_replicas,
    peer,
    sum_gradients,
    tensor_rank,
)
from mindvl_model.megatron.router import RouterStatistics, finish_router_step, router_statistics
from mindvl_model.parallel_config import BuildConfig, check_parallel
from mindvl_model.placeholders import check_placeholders
from mindvl_model.projector import Projector
from mindvl_model.vision.encoder import VisionEncoder
from mindvl_model.vision.positions import Grid, vision_layout
from mindvl_model.vision.spread import plan_peer, take_ranges
from mindvl_ops import Segments

IGNORE_INDEX = -100

ADAPTERS: dict[str, LanguageAdapter] = {
    "qwen2": Qwen2Adapter(),
    "qwen3": Qwen3Adapter(),
    "qwen3_moe": Qwen3MoEAdapter(),
    "deepseek_v3": DeepSeekV3Adapter(),
}


class MindVLModel(MegatronModule):
    """Vision encoder and projector on the first pipeline stage, the language model over all stages."""

    def __init__(
        self,
        config: MindVLConfig,
        build_config: BuildConfig,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        parallel = build_config.parallel
        check_parallel(config, parallel)
        self.adapter = ADAPTERS[config.language.kind]
        language = self.adapter.build(
            config.language, build_config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
        super().__init__(config=language.config)
        self.mindvl, self.parallel = config, parallel
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.model_type = language.model_type
        self.share_embeddings_and_output_weights = config.language.tie_embeddings
        self.vision = VisionEncoder(config.vision, build_config) if pre_process else None
        self.projector = Projector(config.vision, config.language.hidden_size, build_config) if pre_process else None
        self.language = language
        self._segment_losses: list[Tensor] = []
        mark_split_weights(self)
        for part in (self.vision, self.projector):
            if parallel.spread_images and part is not None:
                mark_whole(part)

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
        pad_to: int | None = None,
    ) -> Tensor:
        """Summed loss of one packed pack (scalar float32); hidden states [T, 1, H] on all but the last stage.

        With context parallel every rank is given the whole pack, and the loss is the sum over its slice.

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
            pad_to: Length that the pack is padded to inside the model: all packs of a step need one length where stages
                hand on activations. None: what cp_size and tp_size need.
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
            pad_to,
        )
        if not self.post_process:
            return hidden
        if self.training and torch.is_grad_enabled():
            losses = hidden.detach().squeeze(0)
            first = context_rank() * len(losses) if self.parallel.cp_size > 1 else 0
            self._segment_losses.append(losses_by_segment(losses, labels, cu_seqlens, first))
        return hidden.sum(dtype=torch.float32)

    def logits(self, **inputs: Any) -> Tensor:
        """Logits [T, V] of one packed pack; takes what forward takes, labels are ignored. Whole models only."""
        inputs.pop("max_seqlen", None)
        inputs["labels"] = None
        return self._run(**inputs).squeeze(0)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Activations of the previous pipeline stage (called by megatron-core's schedules)."""
        tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.language.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The tied embedding matrix (asked for by megatron-core when gradients of both ends are summed)."""
        return self.language.shared_embedding_or_output_weight()

    def finish_router_step(self, *, move_bias: bool = True) -> None:
        """End a step for the routers: sum its counts over all ranks, move balancing biases, keep the statistics.

        Call it once after every optimizer step, on every rank and for every virtual stage; one small collective.

        Args:
            move_bias: False where the step was left out and nothing may change.
        """
        finish_router_step(self, move_bias=move_bias)

    def router_statistics(self) -> list[RouterStatistics]:
        """How each layer with experts on this stage routed during the last finished step; empty without experts."""
        return router_statistics(self)

    def take_segment_losses(self) -> list[Tensor]:
        """Sum of losses and loss tokens [2, num_segments] of every pack trained on since the last call, in order.

        This rank's part of them; sums over context-parallel peers are those of the packs. Empty on all but the last
        stage. Take them once in a while: they are kept until then.
        """
        taken, self._segment_losses = self._segment_losses, []
        return taken

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
        pad_to: int | None = None,
    ) -> Tensor:
        pack, position_ids = self._packed_sequence(input_ids, labels, position_ids, cu_seqlens, pad_to)
        embeddings = None
        if self.pre_process:
            if input_ids.device.type == "cpu":
                check_placeholders(
                    self.mindvl, input_ids=input_ids, image_grid_thw=image_grid_thw, video_grid_thw=video_grid_thw
                )
            images, videos = self.encode_media(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
            embeddings = self._embed(pack, images, videos)
        pack.cos, pack.sin = self.adapter.rotary_angles(self.mindvl.language, pack.own_slice(position_ids))
        return self.language(
            None,
            None,
            None,
            decoder_input=embeddings,
            labels=None if pack.labels is None else pack.own_slice(pack.labels).unsqueeze(0),
            packed_seq_params=pack,
        )

    def _packed_sequence(
        self, input_ids: Tensor, labels: Tensor | None, position_ids: Tensor, cu_seqlens: Tensor, pad_to: int | None
    ) -> tuple[PackedSequence, Tensor]:
        """The pack for all layers, and its positions, both padded by a segment of its own that learns nothing."""
        pad, num_tokens = self.mindvl.tokens.pad, len(input_ids)
        segments = Segments.from_cu_seqlens(cu_seqlens)
        more = self.parallel.padded_length(max(num_tokens, pad_to or 0)) - num_tokens
        num_loss_tokens = None if labels is None else (labels != IGNORE_INDEX).sum()
        if more:
            segments = Segments((*segments.lengths, more))
            input_ids, position_ids = F.pad(input_ids, (0, more), value=pad), F.pad(position_ids, (0, more))
            labels = None if labels is None else F.pad(labels, (0, more), value=IGNORE_INDEX)
        pack = PackedSequence(
            segments=segments,
            input_ids=input_ids,
            labels=labels,
            num_loss_tokens=num_loss_tokens,
            num_tokens=num_tokens,
            cp_rank=context_rank() if self.parallel.cp_size > 1 else 0,
            cp_size=self.parallel.cp_size,
        )
        pack.is_token = pack.own_slice(input_ids) != pad
        return pack, position_ids

    def _embed(self, pack: PackedSequence, images: Tensor, videos: Tensor) -> Tensor:
        """Embeddings [T/(cp*tp), 1, H] of this rank's slice of the pack, visual tokens in place."""
        assert pack.input_ids is not None
        ids = pack.own_slice(pack.input_ids)
        words = self.language.scatter(self.language.embedding(input_ids=ids.unsqueeze(0), position_ids=None))
        embeddings = words.squeeze(1)  # [T/(cp*tp), H]
        first = pack.cp_rank * len(ids) + (tensor_rank() * len(embeddings) if self.parallel.tp_size > 1 else 0)
        tokens = self.mindvl.tokens
        for placeholder, visual_tokens in ((tokens.image, images), (tokens.video, videos)):
            if placeholder is None:
                continue  # check_placeholders has seen that there are none
            is_place = pack.input_ids == placeholder
            # check_placeholders again for who did not call it, without waiting for the answer. An NPU has no assertion.
            if is_place.device.type == "cuda":
                torch._assert_async(is_place.sum() == len(visual_tokens))
            embeddings = _with_visual_tokens(embeddings, is_place, visual_tokens.to(embeddings.dtype), first)
        return embeddings.unsqueeze(1)

    def encode_media(
        self,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Visual tokens [G_images, H] and [G_videos, H], each in input order; of the whole pack on every rank."""
        vision = self.mindvl.vision
        images = [tuple(grid) for grid in image_grid_thw.tolist()]
        videos = [] if video_grid_thw is None else [tuple(grid) for grid in video_grid_thw.tolist()]
        num_images = sum(t * h * w for t, h, w in images) // vision.spatial_merge_size**2
        grids = images + videos
        num_videos = sum(t * h * w for t, h, w in videos) // vision.spatial_merge_size**2
        if self.parallel.spread_images and grids:
            visual_tokens = self._encode_part(images, videos, pixel_values, pixel_values_videos)
        else:
            visual_tokens = self._encode(grids, pixel_values, pixel_values_videos)
            if self.parallel.tp_size > 1 and not self.parallel.spread_images:
                visual_tokens = sum_gradients(visual_tokens)
        return visual_tokens[:num_images], visual_tokens[num_images : num_images + num_videos]

    def _encode(self, grids: list[Grid], pixel_values: Tensor, pixel_values_videos: Tensor | None) -> Tensor:
        """Visual tokens of these images and videos in their order, at least one."""
        assert self.vision is not None
        assert self.projector is not None
        vision = self.mindvl.vision
        if not grids:
            # Every rank must reach every collective, with media or without, and every parameter a gradient: a blank
            # image, of which nothing is used.
            side = vision.spatial_merge_size
            grids, pixel_values = [(1, side, side)], pixel_values.new_zeros(side**2, pixel_values.shape[-1])
        plan = vision_layout(grids, vision)
        visual_tokens: Tensor = self.projector(self.vision(pixel_values, plan, pixel_values_videos))
        if plan.restore is not None:
            visual_tokens = visual_tokens[plan.restore.to(visual_tokens.device)]
        return visual_tokens

    def _encode_part(
        self, images: list[Grid], videos: list[Grid], pixel_values: Tensor, pixel_values_videos: Tensor | None
    ) -> Tensor:
        """Visual tokens of the whole pack, of which this rank encodes a part and its peers the others."""
        part = plan_peer(images, videos, self.mindvl.vision.spatial_merge_size, *peer())
        patches = take_ranges(pixel_values, part.image_ranges)
        video_patches = None if pixel_values_videos is None else take_ranges(pixel_values_videos, part.video_ranges)
        own = self._encode(part.grids, patches, video_patches)[: part.num_tokens]
        gathered = gather_parts(F.pad(own, (0, 0, 0, part.slot - part.num_tokens)))
        return gathered[part.order.to(gathered.device)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For megatron-core's checkpoints: the same names and places whether images are spread or not."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.parallel.spread_images:
            number_replicas({name: one for name, one in state.items() if not name.startswith(f"{prefix}language.")})
        return state


def losses_by_segment(losses: Tensor, labels: Tensor, cu_seqlens: Tensor, first: int = 0) -> Tensor:
    """Sum of losses and loss tokens [2, num_segments] float32 of a slice of the pack.

    Args:
        losses: [T/cp] of the slice, which may end in padding of the model's own.
        labels, cu_seqlens: [T] and [num_segments + 1] of the whole pack.
        first: Where the slice begins.
    """
    learned = labels[first : first + len(losses)] != IGNORE_INDEX
    borders = [min(max(border - first, 0), len(losses)) for border in cu_seqlens.tolist()]  # they are on the host
    values = torch.stack((losses[: len(learned)].float(), learned.float()))
    return torch.stack([values[:, start:end].sum(1) for start, end in pairwise(borders)], dim=1)


def _with_visual_tokens(embeddings: Tensor, is_place: Tensor, visual_tokens: Tensor, first: int) -> Tensor:
    """Put visual tokens in their places, without the host waiting for what only the device knows.

    Args:
        embeddings: [S, H], the whole pack or a slice of it.
        is_place: [T], where the placeholders are; as many as there are visual tokens.
        visual_tokens: [G, H], of the whole pack.
        first: Position of the slice in the pack.
    """
    # A stable sort puts the places first, in order; nonzero would make the host wait for their number.
    places = (~is_place).float().argsort(stable=True)[: len(visual_tokens)]
    if len(embeddings) == len(is_place):
        return embeddings.index_copy(0, places, visual_tokens)
    # What belongs to other slices goes into a pack more, which is dropped.
    places = places - first
    is_own = (places >= 0) & (places < len(embeddings))
    places = torch.where(is_own, places, len(embeddings))
    longer = torch.cat((embeddings, embeddings.new_zeros(1, embeddings.shape[1])))
    return longer.index_copy(0, places, visual_tokens)[:-1]
