# SPDX-License-Identifier: Apache-2.0
"""Numbers of a run: gathered in every step, reduced once per report, written to sinks."""
