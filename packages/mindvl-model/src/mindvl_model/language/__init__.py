# SPDX-License-Identifier: Apache-2.0
"""The decoder on megatron-core and its rotary position embedding, built from the properties of language_config.py."""
