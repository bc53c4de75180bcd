# SPDX-License-Identifier: Apache-2.0
"""Configure and build megatron-core blocks for vision encoder, projector and language model, from plain sizes."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from mindvl_model.language_config import LanguageConfig
from mindvl_model.megatron.expert_messages import ExpertMessages
from mindvl_model.megatron.mtp import MultiTokenPrediction, shifted
from mindvl_model.megatron.output_layer import OutputLayer, num_loss_rows
from mindvl_model.megatron.packing import IGNORE_INDEX, PackedSequence
from mindvl_model.megatron.replicas import group_of_one, groups_of_one
from mindvl_model.megatron.spec import GeluTanh, LayerNorm, RMSNorm, SwiGLU, layer_spec
from mindvl_model.parallel_config import BuildConfig, ParallelConfig, RecomputeConfig, chunk_layers
from mindvl_model.vision.registry import VisionEntry

__all__ = [
    "VISION_NORMS",
    "BuildConfig",
    "LanguageModel",
    "MegatronModule",
    "PackedSequence",
    "RMSNorm",
    "TransformerConfig",
    "build_language_model",
    "build_mlp_pair",
    "build_vision_block",
    "mark_split_weights",
    "run_layers",
    "transformer_config",
]

VISION_NORMS: dict[str, type[RMSNorm]] = {"rms_norm": RMSNorm, "layer_norm": LayerNorm}


def transformer_config(
    build_config: BuildConfig, kind: type[TransformerConfig] = TransformerConfig, **sizes: Any
) -> TransformerConfig:
    """Build a TransformerConfig with the settings common to all blocks; `sizes` are fields of TransformerConfig."""
    parallel = build_config.parallel
    shared: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # use the activation of the spec, SwiGLU of spec.py
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "perform_initialization": False,  # done by mindvl_model.parameters, independent of the parallel layout
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": parallel.tp_size,
        "pipeline_model_parallel_size": parallel.pp_size,
        "context_parallel_size": parallel.cp_size,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": build_config.dtype,
        "pipeline_dtype": build_config.dtype,
        "bf16": build_config.dtype == torch.bfloat16,
        "calculate_per_token_loss": True,  # losses are summed and divided once by the global number of loss tokens
    }
    if build_config.recompute.kind != "none":
        shared |= _recompute_fields(build_config.recompute, sizes["num_layers"])
    if parallel.pp_size > 1:
        shared |= _pipeline_fields(parallel, sizes["num_layers"], sizes.get("mtp_num_layers") or 0)
    return kind(**{**shared, **sizes})


def _recompute_fields(recompute: RecomputeConfig, num_layers: int) -> dict[str, Any]:
    if recompute.kind == "selective":
        # PackedAttention implements it for every kind of attention, so no module of megatron-core is recomputed.
        return {"recompute_granularity": "selective", "recompute_modules": []}
    count = num_layers if recompute.layers is None else recompute.layers
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}


def _pipeline_fields(parallel: ParallelConfig, num_layers: int, num_mtp_layers: int) -> dict[str, Any]:
    """The pipeline layout: embedding and vision encoder in the first chunk, output layer and MTP in the last."""
    chunks = [[LayerType.decoder] * count for count in chunk_layers(num_layers, parallel)]
    chunks[0].insert(0, LayerType.embedding)
    chunks[-1] += [LayerType.mtp] * num_mtp_layers + [LayerType.loss]
    interleaved = parallel.virtual_stages > 1
    return {
        "pipeline_model_parallel_layout": PipelineParallelLayerLayout(chunks, parallel.pp_size),
        "virtual_pipeline_model_parallel_size": parallel.virtual_stages if interleaved else None,
        # With two interleaved stages, batched p2p messages silently swap the activations of chunks.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def mark_split_weights(model: torch.nn.Module) -> None:
    """Set the tensor-parallel attributes of every weight that is split over tensor-parallel ranks.

    megatron-core sets them only when it initializes the weights. Without them a weight is treated as replicated: the
    gradient norm covers only the first shard, and gradient clipping is silently wrong.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RowParallelLinear):
            weight = module.weight
            if weight is not None and not hasattr(weight, "tensor_model_parallel"):
                axis = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(weight, True, axis, 1)


def build_vision_block(config: TransformerConfig, entry: VisionEntry, *, whole: bool = False) -> TransformerBlock:
    """Build the layers of a vision encoder, without a final norm, which is part of the projector.

    Args:
        config: Configuration of the block.
        entry: Entry of the encoder in the registry.
        whole: Do not split the block over tensor-parallel ranks.
    """
    activation = {"swiglu": SwiGLU, "gelu_tanh": GeluTanh}[entry.mlp]
    spec = layer_spec(causal=False, query_key_norm=False, norm=VISION_NORMS[entry.norm], activation=activation)
    submodules = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=RMSNorm)
    groups = groups_of_one() if whole else None
    return TransformerBlock(config, submodules, post_layer_norm=False, pg_collection=groups)


def run_layers(
    block: TransformerBlock, hidden: Tensor, pack: PackedSequence, outputs_of: Collection[int]
) -> list[Tensor]:
    """Run the layers of a vision encoder, and return the outputs of some layers, from 0, and of the last one.

    For the blocks of build_vision_block with deepstack layers; the forward of megatron-core returns the last output only.
    """
    outputs = []
    for index, layer in enumerate(block.layers):

        def run(hidden: Tensor, layer: torch.nn.Module = layer) -> Tensor:
            output: Tensor = layer(hidden, None, packed_seq_params=pack)[0]
            return output

        recomputes = block.config.recompute_granularity == "full" and block.training
        hidden = checkpoint(run, False, hidden) if recomputes else run(hidden)
        if index in outputs_of:
            outputs.append(hidden)
    return [*outputs, hidden]


def build_mlp_pair(build_config: BuildConfig, input_size: int, hidden_size: int, output_size: int) -> tuple[Any, Any]:
    """Build two linear layers with bias, input -> hidden -> output, split over tensor-parallel ranks along `hidden_size`.

    With `spread_images` they are not split.
    """
    config = transformer_config(
        build_config.for_vision,
        num_layers=1,
        hidden_size=input_size,
        num_attention_heads=build_config.for_vision.parallel.tp_size,  # unused, but must be a multiple of tp_size
        sequence_parallel=False,
    )
    group = group_of_one() if build_config.parallel.spread_images else None

    def keep(weight: Tensor) -> Tensor:
        return weight

    first = ColumnParallelLinear(
        input_size, hidden_size, config=config, init_method=keep, bias=True, gather_output=False, tp_group=group
    )
    second = RowParallelLinear(
        hidden_size,
        output_size,
        config=config,
        init_method=keep,
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=group,
    )
    return first, second


class LanguageModel(GPTModel):
    """GPTModel of megatron-core whose output layer computes the loss (output_layer.py); labels of -100 are ignored.

    Multi-token prediction layers are on the last stage, which then has a copy of the embedding. Their loss contributes
    to the gradients but is not part of the returned loss.
    """

    expert_messages: ExpertMessages | None = None  # set if experts are on several ranks

    def __init__(
        self, config: TransformerConfig, *args: Any, mtp_spec: ModuleSpec | None = None, **kwargs: Any
    ) -> None:
        self._mtp_spec = mtp_spec
        self._mtp_tally: Tensor | None = None  # [depths, 2]: summed loss and number of labels since take_mtp_loss
        super().__init__(config, *args, **kwargs)

    def setup_embeddings_and_output_layer(self) -> None:
        """Build the MTP layers and give the output layer its loss.

        megatron-core calls it in its constructor, before it ties embedding and output layer.
        """
        if self._mtp_spec is not None and self.post_process:
            if not self.pre_process:
                self.embedding = LanguageModelEmbedding(
                    self.config,
                    self.vocab_size,
                    self.max_sequence_length,
                    position_embedding_type="none",
                    scatter_to_sequence_parallel=False,
                    tp_group=self.pg_collection.tp,
                )
            self.mtp = MultiTokenPrediction(self.config, self._mtp_spec, self.vp_stage)
            self.mtp_process = True
        if self.post_process:
            # megatron-core builds the layer without a way to choose its class; ours has no further state.
            self.output_layer.__class__ = OutputLayer
        super().setup_embeddings_and_output_layer()

    def take_mtp_loss(self) -> Tensor | None:
        """Return and clear the summed loss and number of labels [depths, 2] of MTP on this rank; None without MTP."""
        tally, self._mtp_tally = self._mtp_tally, None
        return tally

    def _postprocess(self, **given: Any) -> Tensor:
        """Hidden states [T/tp, 1, H] -> logits [1, T, V/tp], or with labels the loss of each token [1, T]."""
        hidden_states: Tensor = given["hidden_states"]
        if not self.post_process:
            return hidden_states
        labels: Tensor | None = given["labels"]
        pack: PackedSequence = given["packed_seq_params"]
        if labels is None:
            logits: Tensor = self.output_layer(hidden_states, weight=self._tied_weight())[0]
            return logits.transpose(0, 1).contiguous()
        if self.mtp_process and torch.is_grad_enabled():
            hidden_states = self._predict_further(hidden_states, pack)
        return self._losses(hidden_states, labels.squeeze(0), num_loss_rows(pack)).unsqueeze(0)

    def _tied_weight(self) -> Tensor | None:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def _losses(self, hidden_states: Tensor, labels: Tensor, num_rows: int | None) -> Tensor:
        losses: Tensor = self.output_layer(hidden_states, weight=self._tied_weight(), labels=labels, num_rows=num_rows)
        return losses

    def _predict_further(self, hidden_states: Tensor, pack: PackedSequence) -> Tensor:
        """Return the same hidden states, with the losses of all MTP depths added to their gradient."""
        assert pack.input_ids is not None
        assert pack.labels is not None
        assert pack.segments is not None
        deeper, weight = hidden_states, self.config.mtp_loss_scaling_factor / len(self.mtp.layers)
        tallies = []
        for steps, layer in enumerate(self.mtp.layers, start=1):
            # Visual tokens are represented by their placeholder, because they may be on another stage.
            ids = pack.own_slice(shifted(pack.input_ids, pack.segments, steps, fill=0))
            embeddings = self.embedding(input_ids=ids.unsqueeze(0), position_ids=None)
            deeper = layer(deeper, self.scatter(embeddings), pack)
            targets = pack.own_slice(shifted(pack.labels, pack.segments, steps, fill=IGNORE_INDEX))
            losses = self._losses(deeper, targets, num_loss_rows(pack, steps))
            hidden_states = MTPLossAutoScaler.apply(hidden_states, weight * losses)
            tallies.append(torch.stack((losses.detach().sum(dtype=torch.float32), (targets != IGNORE_INDEX).sum())))
        tally = torch.stack(tallies)
        self._mtp_tally = tally if self._mtp_tally is None else self._mtp_tally + tally
        return hidden_states

    def scatter(self, embeddings: Tensor) -> Tensor:
        """Return this rank's slice of [T, 1, H] with sequence parallelism, otherwise the input."""
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(embeddings)
        return embeddings


def build_language_model(
    transformer: TransformerConfig,
    config: LanguageConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    layers: Sequence[ModuleSpec],
    mtp_layer: ModuleSpec | None = None,
) -> LanguageModel:
    """Build the decoder, or one pipeline stage of it. Rotary angles are part of the PackedSequence, not of the model.

    Args:
        transformer: Configuration of megatron-core.
        config: Configuration of the language model.
        pre_process: Whether this is the first stage.
        post_process: Whether this is the last stage.
        vp_stage: Index of the virtual pipeline stage; None without virtual stages.
        layers: Spec of each layer of the whole decoder.
        mtp_layer: Spec of the transformer layer in each of the transformer.mtp_num_layers MTP depths.
    """
    first = get_transformer_layer_offset(transformer, vp_stage)
    own = layers[first : first + get_num_layers_to_build(transformer, vp_stage=vp_stage)]
    return LanguageModel(
        transformer,
        TransformerBlockSubmodules(layer_specs=list(own), layer_norm=RMSNorm),
        config.vocab_size,
        config.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=config.tie_embeddings,
        position_embedding_type="none",
        scatter_embedding_sequence_parallel=False,
        vp_stage=vp_stage,
        mtp_spec=mtp_layer,
    )
