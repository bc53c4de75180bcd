# SPDX-License-Identifier: Apache-2.0
"""transformers directories: export, import, and the transformers implementation of MindVL."""
