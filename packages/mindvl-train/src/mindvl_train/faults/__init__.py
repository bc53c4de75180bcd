# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a run, and how it is noticed: bad steps, stuck ranks, slow ranks."""
