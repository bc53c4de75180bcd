# SPDX-License-Identifier: Apache-2.0
"""MindVLModel: embed tokens, insert visual tokens at their placeholders, run the language model, sum the loss.

Its inputs are the tensors of a batch of the data package, under the same names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindvl_model.config import MindVLConfig
from mindvl_model.deepstack import attach, join_message, split_message
from mindvl_model.language.decoder import build_decoder
from mindvl_model.language.rotary import rotary_angles
from mindvl_model.megatron.blocks import MegatronModule, PackedSequence, mark_split_weights
from mindvl_model.megatron.offload import ActivationOffload
from mindvl_model.megatron.output_layer import check_loss_positions
from mindvl_model.megatron.packing import IGNORE_INDEX
from mindvl_model.megatron.replicas import (
    context_rank,
    gather_parts,
    mark_whole,
    number_replicas,
    sum_gradients,
    tensor_and_context_rank,
    tensor_rank,
)
from mindvl_model.megatron.router import RouterStatistics, finish_router_step, router_statistics
from mindvl_model.parallel_config import BuildConfig, carried_features, check_parallel
from mindvl_model.placeholders import check_placeholders
from mindvl_model.projector import Projector
from mindvl_model.segment_losses import PackPrediction, losses_by_segment, pack_prediction
from mindvl_model.vision.encoder import VisionEncoder
from mindvl_model.vision.positions import Grid, patch_order
from mindvl_model.vision.spread import take_ranges, vision_shard
from mindvl_ops import Segments, to_device


class MindVLModel(MegatronModule):
    """The whole model or one pipeline stage: vision encoder and projector are on the first, the decoder on all.

    Args:
        config: Configuration of the whole model.
        build_config: Parallel layout, recomputation and data type.
        pre_process: Whether this is the first stage.
        post_process: Whether this is the last stage.
        vp_stage: Index of the virtual pipeline stage; None without virtual stages.

    Raises:
        ModelError: The parallel layout cannot split the model.
    """

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
        language = build_decoder(
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
        if build_config.recompute.offload_layers:
            ActivationOffload().install(language.decoder.layers[: build_config.recompute.offload_layers])
        self._num_carried = carried_features(config, parallel)
        self._received: Tensor | None = None  # the message of the previous stage
        self._segment_losses: list[Tensor] = []
        self._predictions: list[PackPrediction] | None = None
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
        loss_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss of a packed sequence (float32 scalar), or hidden states [T, 1, H] before the last stage.

        With context parallelism every rank gets the whole pack and returns the loss of its slice. The model runs on the
        device of `input_ids`; pass `cu_seqlens` and the grids on the host, as the data loader does, because reading them
        from the device makes the host wait.

        Args:
            input_ids: [T] token ids.
            labels: [T], already shifted; positions with -100 have no loss.
            position_ids: [3, T], starting at 0 in each segment.
            cu_seqlens: [num_segments + 1], first entry 0.
            max_seqlen: Not used; accepted because batches contain it.
            pixel_values: uint8 [P, C*patch*patch], patches of all images, concatenated.
            image_grid_thw: [num_images, 3] patches along time, height and width.
            pixel_values_videos: uint8 [P_videos, C*temporal_patch*patch*patch], patches of all videos, concatenated.
            video_grid_thw: [num_videos, 3] patches along time, height and width.
            pad_to: Length in tokens to which the model pads the pack. Pipeline stages need the same length for all packs
                of a step. None: the length required by cp_size and tp_size.
            loss_positions: [L] positions of the labels, on the host as in a batch of the data loader. The output layer
                then computes the logits of these tokens only. None: of all tokens.

        Raises:
            ModelError: The placeholders do not match the images and videos (inputs on the CPU only).
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
            loss_positions,
        )
        if not self.post_process:
            return hidden
        losses = hidden.detach().squeeze(0)
        first = context_rank() * len(losses) if self.parallel.cp_size > 1 else 0
        if self._predictions is not None:
            predicted = self.language.output_layer.predicted
            self._predictions.append(pack_prediction(losses, predicted, labels, cu_seqlens, first))
        elif self.training and torch.is_grad_enabled():
            self._segment_losses.append(losses_by_segment(losses, labels, cu_seqlens, first))
        return hidden.sum(dtype=torch.float32)

    def logits(self, **inputs: Any) -> Tensor:
        """Return the logits [T, V] of a packed sequence. Arguments as in `forward`, without labels; whole models only."""
        inputs.pop("max_seqlen", None)
        inputs["labels"] = None
        return self._run(**inputs).squeeze(0)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Set the activations of the previous pipeline stage, or release them; called by the schedules of megatron-core."""
        tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self._received = tensor
        self.language.set_input_tensor(tensor)

    @property
    def message_parts(self) -> int:
        """Tensors of the length of a pack in a message between pipeline stages: hidden states and carried features."""
        return 1 + self._num_carried

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the tied embedding matrix; megatron-core calls it to sum the gradients of first and last stage."""
        return self.language.shared_embedding_or_output_weight()

    def finish_router_step(self, *, move_bias: bool = True) -> None:
        """Finish a step of the routers: reduce their counts over all ranks, update biases and statistics.

        Call once after every optimizer step, on every rank and for every virtual stage. Runs one small all-reduce.

        Args:
            move_bias: Update the load-balancing biases; False for a skipped step.
        """
        finish_router_step(self, move_bias=move_bias)

    def router_statistics(self) -> list[RouterStatistics]:
        """Statistics of the last finished step for each layer with experts on this stage."""
        return router_statistics(self)

    def take_segment_losses(self) -> list[Tensor]:
        """Return and clear the losses per segment of the packs since the last call, one tensor [2, num_segments] per pack.

        The rows are the summed loss and the number of loss tokens of this rank; with context parallelism, sum them over
        its ranks. Empty before the last stage. Call it regularly, because the tensors are kept until then.
        """
        taken, self._segment_losses = self._segment_losses, []
        return taken

    @contextmanager
    def predictions(self) -> Iterator[list[PackPrediction]]:
        """Evaluate packs instead of training: in the block the model is in evaluation mode, without gradients.

        Yields:
            A list to which every forward adds the losses and the most likely tokens of its pack; empty before the last
            stage. Losses of training that were not taken yet stay.
        """
        was_training, self._predictions = self.training, []
        if self.post_process:
            self.language.output_layer.predicts = True
        self.eval()
        try:
            with torch.no_grad():
                yield self._predictions
        finally:
            self._predictions = None
            if self.post_process:
                self.language.output_layer.predicts, self.language.output_layer.predicted = False, None
            self.train(was_training)

    def take_mtp_loss(self) -> Tensor | None:
        """Return and clear the summed loss and number of labels [depths, 2] of multi-token prediction on this rank."""
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
        loss_positions: Tensor | None = None,
    ) -> Tensor:
        pack, position_ids = self._packed_sequence(input_ids, labels, position_ids, cu_seqlens, pad_to)
        if labels is not None and loss_positions is not None:
            check_loss_positions(loss_positions, labels)
            pack.loss_positions = loss_positions
        embeddings, further = None, list[Tensor]()  # deepstack features for the next stages
        if self.pre_process:
            if input_ids.device.type == "cpu":
                check_placeholders(
                    self.mindvl, input_ids=input_ids, image_grid_thw=image_grid_thw, video_grid_thw=video_grid_thw
                )
            images, videos = self.encode_media(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
            embeddings, further = self._attach(pack, *self._embed(pack, images, videos))
        elif self._num_carried:
            assert self._received is not None
            hidden, further = self._attach(pack, *split_message(self._received, self._num_carried))
            self.language.set_input_tensor(hidden)
        pack.cos, pack.sin = rotary_angles(self.mindvl.language, pack.own_slice(position_ids))
        output: Tensor = self.language(
            None,
            None,
            None,
            decoder_input=embeddings,
            labels=None if pack.labels is None else pack.own_slice(pack.labels).unsqueeze(0),
            packed_seq_params=pack,
        )
        return output if self.post_process else join_message(output, further, self._num_carried)

    def _attach(self, pack: PackedSequence, hidden: Tensor, features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Attach the features for the layers of this stage; returns its input, and the features for later stages."""
        layers = self.language.decoder.layers
        first = int(layers[0].layer_number) if layers else 1  # global number of megatron-core, from 1
        count = min(len(layers), max(0, len(self.mindvl.vision.deepstack_layers) - (first - 1)))
        return attach(hidden, features[:count], pack.added_after, first), features[count:]

    def _packed_sequence(
        self, input_ids: Tensor, labels: Tensor | None, position_ids: Tensor, cu_seqlens: Tensor, pad_to: int | None
    ) -> tuple[PackedSequence, Tensor]:
        """Return the pack and its position ids, both padded with a segment that has no labels."""
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

    def _embed(self, pack: PackedSequence, images: Tensor, videos: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the embeddings [T/(cp*tp), 1, H] of this rank's slice of the pack, with visual tokens inserted.

        The deepstack features, which are part of the visual tokens, are returned in the same form, zero at text.
        """
        assert pack.input_ids is not None
        ids = pack.own_slice(pack.input_ids)
        words = self.language.scatter(self.language.embedding(input_ids=ids.unsqueeze(0), position_ids=None))
        embeddings = words.squeeze(1)  # [T/(cp*tp), H]
        first = pack.cp_rank * len(ids) + (tensor_rank() * len(embeddings) if self.parallel.tp_size > 1 else 0)
        tokens = self.mindvl.tokens
        parts = [embeddings, *(torch.zeros_like(embeddings) for _ in self.mindvl.vision.deepstack_layers)]
        for placeholder, visual_tokens in ((tokens.image, images), (tokens.video, videos)):
            if placeholder is None:
                continue  # check_placeholders refuses videos here
            is_placeholder = pack.input_ids == placeholder
            # The check of check_placeholders, without making the host wait. Not available on NPUs.
            if is_placeholder.device.type == "cuda":
                torch._assert_async(is_placeholder.sum() == len(visual_tokens))
            positions = _first_positions(is_placeholder, len(visual_tokens))
            rows = visual_tokens.to(embeddings.dtype).chunk(len(parts), dim=-1)
            parts = [
                _with_rows(part, positions - first, own, is_slice=len(part) < len(is_placeholder))
                for part, own in zip(parts, rows, strict=True)
            ]
        embeddings, *features = (part.unsqueeze(1) for part in parts)
        return embeddings, features

    def encode_media(
        self,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the visual tokens [G_images, H] and [G_videos, H] of the whole pack in input order, on every rank.

        With D deepstack layers their features follow along the last axis, [G, (1 + D)*H].
        """
        vision = self.mindvl.vision
        images = [tuple(grid) for grid in image_grid_thw.tolist()]
        videos = [] if video_grid_thw is None else [tuple(grid) for grid in video_grid_thw.tolist()]
        num_images = sum(t * h * w for t, h, w in images) // vision.spatial_merge_size**2
        grids = images + videos
        num_videos = sum(t * h * w for t, h, w in videos) // vision.spatial_merge_size**2
        if self.parallel.spread_images and grids:
            visual_tokens = self._encode_shard(images, videos, pixel_values, pixel_values_videos)
        else:
            visual_tokens = self._encode(grids, pixel_values, pixel_values_videos)
            if self.parallel.tp_size > 1 and not self.parallel.spread_images:
                visual_tokens = sum_gradients(visual_tokens)
        return visual_tokens[:num_images], visual_tokens[num_images : num_images + num_videos]

    def _encode(self, grids: list[Grid], pixel_values: Tensor, pixel_values_videos: Tensor | None) -> Tensor:
        """Return the visual tokens of these images and videos in input order; without any, those of a blank image."""
        assert self.vision is not None
        assert self.projector is not None
        vision = self.mindvl.vision
        if not grids:
            # Every rank must take part in every collective and every parameter must get a gradient, so a pack without
            # images encodes a blank image, whose visual tokens are not used.
            side = vision.spatial_merge_size
            grids, pixel_values = [(1, side, side)], pixel_values.new_zeros(side**2, pixel_values.shape[-1])
        order = patch_order(grids, vision)
        visual_tokens: Tensor = self.projector(self.vision(pixel_values, order, pixel_values_videos))
        if order.restore is not None:
            visual_tokens = visual_tokens[to_device(order.restore, visual_tokens.device)]
        return visual_tokens

    def _encode_shard(
        self, images: list[Grid], videos: list[Grid], pixel_values: Tensor, pixel_values_videos: Tensor | None
    ) -> Tensor:
        """Return the visual tokens of the whole pack; each tensor- and context-parallel rank encodes some frames."""
        shard = vision_shard(images, videos, self.mindvl.vision.spatial_merge_size, *tensor_and_context_rank())
        patches = take_ranges(pixel_values, shard.image_ranges)
        video_patches = None if pixel_values_videos is None else take_ranges(pixel_values_videos, shard.video_ranges)
        own = self._encode(shard.grids, patches, video_patches)[: shard.num_tokens]
        gathered = gather_parts(F.pad(own, (0, 0, 0, shard.max_tokens - shard.num_tokens)))
        return gathered[to_device(shard.order, gathered.device)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Sharded state for megatron-core checkpoints; names and offsets do not depend on `spread_images`."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.parallel.spread_images:
            number_replicas({name: one for name, one in state.items() if not name.startswith(f"{prefix}language.")})
        return state


def _first_positions(is_placeholder: Tensor, count: int) -> Tensor:
    """Positions [G] of the placeholders [T] in ascending order, without making the host wait for the device."""
    # A stable sort moves the positions of the placeholders to the front; nonzero would make the host wait for the count.
    return (~is_placeholder).float().argsort(stable=True)[:count]


def _with_rows(values: Tensor, positions: Tensor, rows: Tensor, *, is_slice: bool) -> Tensor:
    """Replace rows of values [S, H] at positions [G] by rows [G, H].

    Args:
        is_slice: Positions may be outside of the slice; these rows are dropped.
    """
    if not is_slice:
        return values.index_copy(0, positions, rows)
    # Rows of other slices are written to an extra row, which is dropped.
    is_own = (positions >= 0) & (positions < len(values))
    positions = torch.where(is_own, positions, len(values))
    extended = torch.cat((values, values.new_zeros(1, values.shape[1])))
    return extended.index_copy(0, positions, rows)[:-1]
