# SPDX-License-Identifier: Apache-2.0
"""The demo: real handwritten digits, from scans to a merged, searched and exported model."""
