# SPDX-License-Identifier: Apache-2.0
"""The transformers implementation of MindVL, written next to the exported weights as remote code.

Imports only transformers, so that the directory can be used without mindvl. Position ids of the language model are
sequential over all tokens, including visual tokens, as in training.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.utils.generic import can_return_tuple

from .configuration_mindvl import DEFAULT_ENCODER, MindVLConfig

VISION_ENCODERS: dict[str, Any] = {  # by model_type of vision_config
    DEFAULT_ENCODER: Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl_vision": Qwen3VLVisionModel,
}


class MindVLPreTrainedModel(PreTrainedModel):
    """Attributes with which transformers loads the model and places it on devices."""

    config_class = MindVLConfig
    base_model_prefix = "model"
    input_modalities = ("image", "video", "text")  # type: ignore[assignment]
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen2_5_VLVisionBlock", "Qwen3VLVisionBlock"]  # noqa: RUF012 - the language model has its own
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True  # vLLM and SGLang insert their own attention


class MindVLModel(MindVLPreTrainedModel):
    """Vision encoder and language model without the output head."""

    def __init__(self, config: MindVLConfig) -> None:
        super().__init__(config)
        self.visual = VISION_ENCODERS[config.vision_config.model_type]._from_config(config.vision_config)
        self.language_model = AutoModel.from_config(config.text_config)
        self._features: list[Tensor] = []  # deepstack features of this forward pass, zero at text
        self._add_features_after_layers(len(getattr(config.vision_config, "deepstack_visual_indexes", ())))
        first, further = config.text_config.num_hidden_layers, getattr(config.text_config, "num_mtp_layers", 0)
        # Multi-token prediction layers are used in training and for speculative decoding only.
        self._keys_to_ignore_on_load_unexpected = [rf"layers\.{first + depth}\." for depth in range(further)]
        self.post_init()

    def _add_features_after_layers(self, count: int) -> None:
        """Let each of the first layers of the language model add its deepstack features to its output."""
        if count and "vllm" in (self.config._attn_implementation, self.config.text_config._attn_implementation):
            raise ValueError(
                "deepstack_visual_indexes: not supported by the transformers backend of vLLM, which passes one embedding "
                "for each visual token. Use transformers, or train a model with deepstack_layers: []."
            )

        def add_to(number: int) -> Any:
            def add(layer: nn.Module, args: Any, output: Any) -> Any:
                if number >= len(self._features):
                    return output
                hidden = output if isinstance(output, Tensor) else output[0]
                hidden = hidden + self._features[number].to(hidden)
                return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

            return add

        for number, layer in enumerate(self.language_model.layers[:count]):
            layer.register_forward_hook(add_to(number))

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    @can_return_tuple
    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """The visual tokens [G, H] of each image in `pooler_output`, as in Qwen2.5-VL; vLLM and SGLang read this.

        Further inputs, which they pass, are ignored.
        """
        outputs = self.visual(pixel_values.to(self.visual.dtype), grid_thw=image_grid_thw)
        sizes = image_grid_thw.prod(-1) // self.visual.spatial_merge_size**2
        outputs.pooler_output = outputs.pooler_output.split(sizes.tolist())
        return outputs

    @can_return_tuple
    def get_video_features(
        self, pixel_values_videos: Tensor, video_grid_thw: Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """The same for videos."""
        return self.get_image_features(pixel_values_videos, video_grid_thw)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        media = (
            ("image", self.config.image_token_id, pixel_values, image_grid_thw),
            ("video", self.config.video_token_id, pixel_values_videos, video_grid_thw),
        )
        self._features = []
        for kind, placeholder, pixels, grid in media:
            if pixels is not None:
                if grid is None:
                    raise ValueError(f"{kind}_grid_thw: is None. Pass all outputs of the processor of this directory.")
                encoded = self.get_image_features(pixels, grid)
                inputs_embeds = self._put(inputs_embeds, input_ids, placeholder, torch.cat(encoded.pooler_output), kind)
                features = getattr(encoded, "deepstack_features", None) or []
                before = self._features or [torch.zeros_like(inputs_embeds) for _ in features]
                self._features = [
                    self._put(zeros, input_ids, placeholder, feature, kind)
                    for zeros, feature in zip(before, features, strict=True)
                ]
        if position_ids is None and attention_mask is not None and past_key_values is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return BaseModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _put(
        self, inputs_embeds: Tensor, input_ids: Tensor | None, placeholder: int | None, visual_tokens: Tensor, kind: str
    ) -> Tensor:
        if input_ids is None or placeholder is None:
            raise ValueError(
                f"{kind}s: input_ids or {kind}_token_id of config.json is None. Pass input_ids, and use a model with "
                f"{kind} support."
            )
        is_placeholder = (input_ids == placeholder)[..., None]
        if int(is_placeholder.sum()) != visual_tokens.shape[0]:
            raise ValueError(
                f"input_ids: {int(is_placeholder.sum())} {kind} placeholders for {visual_tokens.shape[0]} visual "
                "tokens. Create text and pixel values with the processor of this directory."
            )
        return inputs_embeds.masked_scatter(is_placeholder.expand_as(inputs_embeds), visual_tokens.to(inputs_embeds))


class MindVLForConditionalGeneration(MindVLPreTrainedModel, GenerationMixin):
    """MindVL with a language modeling head, for text generation from images, videos and text."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MindVLConfig) -> None:
        super().__init__(config)
        self.model = MindVLModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            vocab_size = self.config.text_config.vocab_size
            # kwargs contain num_items_in_batch, by which the Trainer divides the summed loss
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        config = self.config
        media: dict[str, Any] = {}
        for pixels, grids, placeholder in (
            ("pixel_values", "image_grid_thw", config.image_token_id),
            ("pixel_values_videos", "video_grid_thw", config.video_token_id),
        ):
            given = [model_kwargs.pop(name, None) for name in (pixels, grids)]
            if given[0] is not None:
                # Media of all sequences are concatenated; repeat those of a sequence together, not patch by patch.
                starts = (input_ids[:, :-1] == config.vision_start_token_id) & (input_ids[:, 1:] == placeholder)
                by_sequence = given[1].split(starts.sum(-1).tolist())
                patches = given[0].split([int(grid.prod(-1).sum()) for grid in by_sequence])
                given = [
                    torch.cat([one for one in each for _ in range(expand_size)]) for each in (patches, by_sequence)
                ]
            media |= dict(zip((pixels, grids), given, strict=True))
        expand: Any = super()._expand_inputs_for_generation  # type: ignore[misc]
        input_ids, model_kwargs = expand(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        return input_ids, model_kwargs | media

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        prepare: Any = super().prepare_inputs_for_generation  # type: ignore[misc]
        inputs: dict[str, Any] = prepare(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration and kwargs.get("use_cache", True):
            inputs["pixel_values"] = inputs["pixel_values_videos"] = None  # already in the cache
        return inputs


__all__ = ["MindVLForConditionalGeneration", "MindVLModel", "MindVLPreTrainedModel"]
