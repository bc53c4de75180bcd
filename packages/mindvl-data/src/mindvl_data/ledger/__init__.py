# SPDX-License-Identifier: Apache-2.0
"""What a run consumed and trained on, from its records, and the verification against the data order."""

from mindvl_data.ledger.account import TrainingRecords, read_skipped
from mindvl_data.ledger.verify import consumed, verify

__all__ = ["TrainingRecords", "consumed", "read_skipped", "verify"]
