# SPDX-License-Identifier: Apache-2.0
"""Vision encoders: from the patches of all images of a packed sequence to one vector per patch."""
