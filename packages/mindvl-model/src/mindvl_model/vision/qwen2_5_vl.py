# SPDX-License-Identifier: Apache-2.0
"""The vision encoder of Qwen2.5-VL (arXiv 2502.13923): RMS norms, gated MLPs, window attention in most layers.

One entry of the registry in entries.py. The defaults are those of the published directories.
"""

from mindvl_model.vision.registry import Published, TensorNames, VideoRule, VisionEntry

QWEN2_5_VL = VisionEntry(
    title="Qwen2.5-VL",
    norm="rms_norm",
    mlp="swiglu",
    patch_bias=False,
    defaults={
        "patch_size": 14,
        "window_size": 112,
        # From CLIP (arXiv 2103.00020).
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
    },
    absent={"num_position_embeddings": 0, "deepstack_layers": ()},
    tensors=TensorNames(
        patch_embedding="patch_embed.proj",
        norms=("norm1", "norm2"),
        qkv="attn.qkv",
        attention_output="attn.proj",
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        merger="merger",
        merger_parts=("ln_q", "mlp.0", "mlp.2"),
    ),
    video=VideoRule(
        frames="stride",
        budget="per_frame",
        timestamps=False,
        fps=2.0,
        min_frames=4,
        max_frames=768,
        min_tokens=128,
        max_tokens=768,
        total_tokens=24_576,
    ),
    coordinates="absolute",  # docs of Qwen2.5-VL: of the image that the processor returns
    published=Published(
        model_type="qwen2_5_vl_vision",
        processor="Qwen2_5_VLProcessor",
        image_processor="Qwen2VLImageProcessor",
        video_processor="Qwen2VLVideoProcessor",
        keys={
            "hidden_size": "hidden_size",
            "num_layers": "depth",
            "num_heads": "num_heads",
            "ffn_hidden_size": "intermediate_size",
            "full_attention_layers": "fullatt_block_indexes",
            "window_size": "window_size",
            "patch_size": "patch_size",
            "temporal_patch_size": "temporal_patch_size",
            "spatial_merge_size": "spatial_merge_size",
            "in_channels": "in_channels",
        },
        defaults={
            "num_layers": 32,
            "num_heads": 16,
            "ffn_hidden_size": 3420,
            "full_attention_layers": (7, 15, 23, 31),
            "window_size": 112,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
        },
    ),
)
