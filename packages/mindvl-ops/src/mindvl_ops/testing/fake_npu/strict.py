# SPDX-License-Identifier: Apache-2.0
"""Rules that the hardware would not notice, or on which document and code disagree; each can be switched off."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Strict:
    """Every flag on: the simulator also refuses what an NPU silently computes wrongly."""

    mask_window: bool = True  # sparse mode 0: pre and next tokens must keep every pair that the mask keeps
    mask_content: bool = True  # compressed modes: the mask holds what the mode expects, not only its shape
    masked_row: bool = True  # TND: no row of the mask is all True
    routing_rows: bool = True  # routing map without padding: every row has exactly K ones
    documented_limits: bool = True  # the narrower limit where document and code disagree
    upper_case_layout: bool = True  # "tnd" passes the host check and is then treated as another layout
    cumulative_groups: bool = True  # npu_grouped_matmul_add ignores group_list_type on A2
    rotary_range: bool = True  # cosine and sine lie in [-1, 1]
    reserved_arguments: bool = True  # fixed_triu_mask, z-loss and others that the documents call reserved
    unused_outputs: bool = True  # a gradient into an output that the backward ignores
