# SPDX-License-Identifier: Apache-2.0
"""Vision encoder of Qwen2.5-VL: from the patches of all images of a packed sequence to one vector per patch."""
