# SPDX-License-Identifier: Apache-2.0
"""The parts of the model that stand on this pipeline rank, one for each virtual stage.

Comes after the process groups of the layout are made; before gradient buffers are put around each part.
"""

from megatron.core import parallel_state

from mindvl_model.config import MindVLConfig
from mindvl_model.model import MindVLModel
from mindvl_model.parallel_config import BuildConfig


def build_stages(config: MindVLConfig, build_config: BuildConfig) -> list[MindVLModel]:
    """The chunks of this pipeline rank in the order of their virtual stage; the whole model without a pipeline.

    Raises:
        ModelError: The parallel layout does not fit the model.
    """
    stages = []
    for stage in range(build_config.parallel.virtual_stages):
        vp_stage = stage if build_config.parallel.virtual_stages > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        stages.append(MindVLModel(config, build_config, pre_process=first, post_process=last, vp_stage=vp_stage))
    return stages
