# SPDX-License-Identifier: Apache-2.0
"""What megatron-core 0.16.1 needs on every platform: without TransformerEngine and apex, and where they are installed.

Comes right after the first import of megatron-core. Knows the version; nothing else does.
"""

from mindvl_ops import AdamW


def without_transformer_engine() -> None:
    """Import megatron-core and give it our AdamW where it looks for a fused one.

    With torch's own AdamW its distributed optimizer cannot load a checkpoint: it wants `step` in the parameter group.
    Those of TransformerEngine and apex have no state that our checkpoints could make room for: ours takes their place.
    """
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # read by the router in fp32, defined only with TransformerEngine
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # isinstance() against a mock fails otherwise
    optimizer.Adam = distrib_optimizer.Adam = AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = distrib_optimizer.USING_TE_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
