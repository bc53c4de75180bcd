# SPDX-License-Identifier: Apache-2.0
"""Which sample is used when: a pure function of index, configuration, seed and position."""
