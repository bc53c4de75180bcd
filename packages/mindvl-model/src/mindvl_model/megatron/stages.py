# SPDX-License-Identifier: Apache-2.0
"""Build the part of the model on this pipeline rank, one chunk per virtual stage.

Runs after the process groups are created and before each chunk is wrapped in DistributedDataParallel.
"""

from megatron.core import parallel_state

from mindvl_model.config import MindVLConfig
from mindvl_model.model import MindVLModel
from mindvl_model.parallel_config import BuildConfig


def build_stages(config: MindVLConfig, build_config: BuildConfig) -> list[MindVLModel]:
    """Build the chunks of this pipeline rank, ordered by virtual stage; without a pipeline, the whole model.

    Raises:
        ModelError: The parallel layout cannot split the model.
    """
    stages = []
    for stage in range(build_config.parallel.virtual_stages):
        vp_stage = stage if build_config.parallel.virtual_stages > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        stages.append(MindVLModel(config, build_config, pre_process=first, post_process=last, vp_stage=vp_stage))
    return stages
