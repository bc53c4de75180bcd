# SPDX-License-Identifier: Apache-2.0
"""Vision encoder of Qwen2.5-VL: patches of all images of a row in, one vector per patch out."""
