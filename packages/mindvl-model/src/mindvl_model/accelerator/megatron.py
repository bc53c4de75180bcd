# SPDX-License-Identifier: Apache-2.0
"""Patches that megatron-core 0.16.1 needs on every platform, with or without TransformerEngine and apex.

Applied right after the first import of megatron-core. The supported version is defined here only.
"""

import re
from importlib import metadata

from mindvl_model.errors import ModelError
from mindvl_ops import AdamW

TESTED = (">=0.16.1", "<0.16.2")  # as in pyproject.toml and `mindvl doctor`; private attributes are patched


def check_version() -> None:
    """Check the installed version of megatron-core before it is imported.

    Raises:
        ModelError: megatron-core is not installed, or its version is not supported.
    """
    required = f"megatron-core{','.join(TESTED)}"
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"megatron-core: not installed, but {required} is required. Install it: pip install '{required}'."
        ) from None
    first, end = (_numbers(bound.lstrip("<>=")) for bound in TESTED)
    if not first <= _numbers(found) < end:
        raise ModelError(
            f"megatron-core: version {found} is installed, but {required} is required. "
            f"Install it: pip install '{required}'."
        )


def patch_megatron() -> None:
    """Import megatron-core and make its optimizers use mindvl_ops.AdamW.

    With torch's AdamW the distributed optimizer cannot load a checkpoint, because it expects `step` in the parameter
    group. The fused optimizers of TransformerEngine and apex keep no state that mindvl's checkpoints could restore.
    """
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the fp32 router reads it; defined only with TransformerEngine
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # otherwise isinstance() against a mock fails
    optimizer.Adam = distrib_optimizer.Adam = AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = distrib_optimizer.USING_TE_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, padded: "0.17.0rc1" is (0, 17, 0)."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)
