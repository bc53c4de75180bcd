# SPDX-License-Identifier: Apache-2.0
"""Multimodal training data: shards, a deterministic plan, packed batches, and a ledger of what was consumed."""
