# SPDX-License-Identifier: Apache-2.0
"""The vision encoder of Qwen3-VL: layer norms, MLPs with GELU, an interpolated position embedding, deepstack outputs.

One entry of the registry in entries.py. Source: Qwen3-VL in transformers 5. The defaults are those of the published
directories.
"""

from mindvl_model.vision.registry import Published, TensorNames, VideoRule, VisionEntry

QWEN3_VL = VisionEntry(
    title="Qwen3-VL",
    norm="layer_norm",
    mlp="gelu_tanh",
    patch_bias=True,
    defaults={
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_layers": (),
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
    },
    absent={"window_size": 0},
    tensors=TensorNames(
        patch_embedding="patch_embed.proj",
        norms=("norm1", "norm2"),
        qkv="attn.qkv",
        attention_output="attn.proj",
        mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
        merger="merger",
        merger_parts=("norm", "linear_fc1", "linear_fc2"),
        position_embedding="pos_embed",
        extra_mergers="deepstack_merger_list",
    ),
    video=VideoRule(
        frames="endpoints",
        budget="whole",
        timestamps=True,
        fps=2.0,
        min_frames=4,
        max_frames=768,
        min_tokens=4,
        max_tokens=24_576,
        total_tokens=24_576,
    ),
    coordinates="relative",  # README of Qwen3-VL: from 0 to 1000
    published=Published(
        model_type="qwen3_vl_vision",
        processor="Qwen3VLProcessor",
        image_processor="Qwen2VLImageProcessor",
        video_processor="Qwen3VLVideoProcessor",
        keys={
            "hidden_size": "hidden_size",
            "num_layers": "depth",
            "num_heads": "num_heads",
            "ffn_hidden_size": "intermediate_size",
            "patch_size": "patch_size",
            "temporal_patch_size": "temporal_patch_size",
            "spatial_merge_size": "spatial_merge_size",
            "in_channels": "in_channels",
            "num_position_embeddings": "num_position_embeddings",
            "deepstack_layers": "deepstack_visual_indexes",
        },
        defaults={
            "hidden_size": 1152,
            "num_layers": 27,
            "num_heads": 16,
            "ffn_hidden_size": 4304,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 2304,
            "deepstack_layers": (8, 16, 24),
        },
        only={"hidden_act": ("gelu_pytorch_tanh",)},
    ),
)
