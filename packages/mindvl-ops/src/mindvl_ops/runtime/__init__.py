# SPDX-License-Identifier: Apache-2.0
"""The host side of a run: launch variables, the machine's topology, which cores serve which device (paper, 3.1.5)."""
