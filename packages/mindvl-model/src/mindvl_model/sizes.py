# SPDX-License-Identifier: Apache-2.0
"""Named model sizes: published models and those of the MindVL paper, with sources.

Recipes and commands read them through `named_config`.
"""

from mindvl_model.config import MindVLConfig, TokenConfig, VisionConfig
from mindvl_model.errors import ModelError
from mindvl_model.families.deepseek_v3 import DeepSeekV3Preset
from mindvl_model.families.llama import LlamaPreset
from mindvl_model.families.qwen2 import Qwen2Preset
from mindvl_model.families.qwen3 import Qwen3Preset
from mindvl_model.families.qwen3_moe import Qwen3MoEPreset
from mindvl_model.families.qwen3_vl import Qwen3VLMoEPreset, Qwen3VLPreset
from mindvl_model.families.registry import LanguagePreset
from mindvl_model.language_config import Llama3Scaling

QWEN_TOKENS = TokenConfig(
    image=151655, video=151656, vision_start=151652, vision_end=151653, end_of_turn=151645, pad=151643
)


def _vision(ffn_hidden_size: int) -> VisionConfig:
    """Qwen2.5-VL's vision encoder; the published sizes differ only in ffn_hidden_size."""
    return VisionConfig(
        hidden_size=1280,
        num_layers=32,
        num_heads=16,
        ffn_hidden_size=ffn_hidden_size,
        full_attention_layers=(7, 15, 23, 31),
    )


def _qwen2_5_vl(
    vision_ffn: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    *,
    tie_embeddings: bool = False,
) -> MindVLConfig:
    """A published Qwen2.5-VL: FFN size of the vision encoder, then the sizes of the language model."""
    language = Qwen2Preset(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        ffn_hidden_size=ffn,
        vocab_size=vocabulary,
        tie_embeddings=tie_embeddings,
        after_video="all_axes",  # transformers 4, the version in the published directories
    )
    return MindVLConfig(vision=_vision(vision_ffn), language=language.decoder(), tokens=QWEN_TOKENS)


def _qwen3_vl_vision(*, large: bool) -> VisionConfig:
    """Qwen3-VL's vision encoder, which has two published sizes."""
    return VisionConfig(
        kind="qwen3_vl",
        hidden_size=1152 if large else 1024,
        num_layers=27 if large else 24,
        num_heads=16,
        ffn_hidden_size=4304 if large else 4096,
        deepstack_layers=(8, 16, 24) if large else (5, 11, 17),
    )


def _qwen3_vl(hidden: int, ffn: int, *, large_vision: bool, tie_embeddings: bool) -> MindVLConfig:
    """A published dense Qwen3-VL."""
    language = Qwen3VLPreset(
        hidden_size=hidden,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=ffn,
        vocab_size=151936,
        tie_embeddings=tie_embeddings,
    )
    return MindVLConfig(vision=_qwen3_vl_vision(large=large_vision), language=language.decoder(), tokens=QWEN_TOKENS)


NAMED_SIZES: dict[str, MindVLConfig] = {
    # Small enough to train on two CPU cores; `for_tokenizer` sets the vocabulary size.
    "tiny": MindVLConfig(
        vision=VisionConfig(
            hidden_size=128, num_layers=4, num_heads=4, ffn_hidden_size=256, full_attention_layers=(1, 3), init_std=None
        ),
        language=Qwen3Preset(
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            ffn_hidden_size=384,
            vocab_size=512,
            tie_embeddings=True,
            rotary_base=10000.0,
            max_positions=8192,
            init_std=None,
        ).decoder(),
        tokens=TokenConfig(image=5, vision_start=3, vision_end=4, end_of_turn=2, pad=0, video=6),
    ),
    # Vision encoder of Qwen2.5-VL-72B, Qwen3-8B (paper, section 5.1).
    "mindvl-8b": MindVLConfig(
        vision=_vision(3456),
        language=Qwen3Preset(
            hidden_size=4096,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden_size=12288,
            vocab_size=151936,
        ).decoder(),
        tokens=QWEN_TOKENS,
    ),
    # Vision encoder of Qwen2.5-VL-72B, DeepSeek-V3 (paper, section 5.1). Its tokenizer has no image special tokens:
    # these ids are unused entries of the padded vocabulary until `for_tokenizer` sets those of the run's tokenizer.
    "mindvl-671b-a37b": MindVLConfig(
        vision=_vision(3456),
        language=DeepSeekV3Preset(
            hidden_size=7168,
            num_layers=61,
            num_heads=128,
            ffn_hidden_size=18432,
            vocab_size=129280,
            q_lora_rank=1536,
            kv_lora_rank=512,
            nope_head_dim=128,
            rope_head_dim=64,
            value_head_dim=128,
            num_dense_layers=3,
            num_experts=256,
            experts_per_token=8,
            expert_ffn_hidden_size=2048,
        ).decoder(),
        tokens=TokenConfig(image=128820, video=128821, vision_start=128822, vision_end=128823, end_of_turn=1, pad=2),
    ),
    # Vision encoder of Qwen2.5-VL-7B, Llama 3.2 1B. Its tokenizer has no image special tokens, as that of DeepSeek-V3.
    "llama3.2-1b": MindVLConfig(
        vision=_vision(3420),
        language=LlamaPreset(
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            ffn_hidden_size=8192,
            vocab_size=128256,
            tie_embeddings=True,
            rope_scaling=Llama3Scaling(factor=32.0),
        ).decoder(),
        tokens=TokenConfig(
            image=128002, video=128003, vision_start=128011, vision_end=128012, end_of_turn=128009, pad=128001
        ),
    ),
    "qwen2.5-vl-3b": _qwen2_5_vl(3420, 2048, 36, 16, 2, 11008, 151936, tie_embeddings=True),
    "qwen2.5-vl-7b": _qwen2_5_vl(3420, 3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-vl-32b": _qwen2_5_vl(3456, 5120, 64, 40, 8, 27648, 152064),
    "qwen2.5-vl-72b": _qwen2_5_vl(3456, 8192, 80, 64, 8, 29568, 152064),
    "qwen3-vl-4b": _qwen3_vl(2560, 9728, large_vision=False, tie_embeddings=True),
    "qwen3-vl-8b": _qwen3_vl(4096, 12288, large_vision=True, tie_embeddings=False),
    "qwen3-vl-30b-a3b": MindVLConfig(
        vision=_qwen3_vl_vision(large=True),
        language=Qwen3VLMoEPreset(
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            ffn_hidden_size=6144,
            vocab_size=151936,
            num_experts=128,
            experts_per_token=8,
            expert_ffn_hidden_size=768,
        ).decoder(),
        tokens=QWEN_TOKENS,
    ),
}

# Small decoders of each kind, whose memory `mindvl_train.checks.memory` measures.
MEASURED_DECODERS: dict[str, LanguagePreset] = {
    "dense": Qwen3Preset(
        hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, ffn_hidden_size=768, vocab_size=4000
    ),
    "large": Qwen3Preset(
        hidden_size=768, num_layers=10, num_heads=12, num_kv_heads=4, head_dim=64, ffn_hidden_size=2304, vocab_size=16000
    ),
    "experts": Qwen3MoEPreset(
        hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, ffn_hidden_size=768, vocab_size=4000,
        num_experts=8, experts_per_token=2, expert_ffn_hidden_size=192,
    ),
    "latent": DeepSeekV3Preset(
        hidden_size=256, num_layers=4, num_heads=4, ffn_hidden_size=768, vocab_size=4000, q_lora_rank=96, kv_lora_rank=64,
        nope_head_dim=32, rope_head_dim=16, value_head_dim=32, num_dense_layers=1, num_experts=8, experts_per_token=2,
        expert_ffn_hidden_size=192, num_expert_groups=4, groups_per_token=2, num_mtp_layers=1,
    ),
}  # fmt: skip

# The decoder of `mindvl demo`.
DEMO_DECODER = Qwen3Preset(
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_hidden_size=320,
    vocab_size=384,
    tie_embeddings=True,
    rotary_base=10000.0,
    max_positions=4096,
    init_std=None,
)


def named_config(name: str) -> MindVLConfig:
    """Return the configuration of a size in NAMED_SIZES.

    Raises:
        ModelError: There is no size of this name.
    """
    try:
        return NAMED_SIZES[name]
    except KeyError:
        raise ModelError(f"model size: {name!r} is unknown. Use one of {', '.join(sorted(NAMED_SIZES))}.") from None
