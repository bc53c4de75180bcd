# SPDX-License-Identifier: Apache-2.0
"""Language models: one adapter per family, which builds the decoder on megatron-core."""
