# SPDX-License-Identifier: Apache-2.0
"""What megatron-core 0.16.1 needs on every platform: without TransformerEngine and apex, and where they are installed.

Comes right after the first import of megatron-core. Knows the version; nothing else does.
"""

import re
from importlib import metadata

from mindvl_model.errors import ModelError
from mindvl_ops import AdamW

TESTED = (">=0.16.1", "<0.16.2")  # like in pyproject.toml and `mindvl doctor`; this package changes its insides


def check_version() -> None:
    """Refuse a megatron-core that this file is not written for, before it is imported.

    Raises:
        ModelError: It is not installed, or another version is.
    """
    wanted = f"megatron-core{','.join(TESTED)}"
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"megatron-core: not installed, {wanted} is expected. Install it: pip install '{wanted}'."
        ) from None
    first, end = (_numbers(bound.lstrip("<>=")) for bound in TESTED)
    if not first <= _numbers(found) < end:
        raise ModelError(
            f"megatron-core: found version {found}, but the device setup is written for {wanted}. "
            f"Install it: pip install '{wanted}'."
        )


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


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, padded: "0.17.0rc1" is (0, 17, 0)."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)
