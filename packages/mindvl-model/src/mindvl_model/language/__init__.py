# SPDX-License-Identifier: Apache-2.0
"""Language models: one adapter per family, from our configuration to megatron-core's."""
