# SPDX-License-Identifier: Apache-2.0
"""New names of renamed recipe keys and command options, for the message that refuses an old one.

Used by load.py for YAML keys and KEY=VALUE overrides, and by failures.py for options.
"""

KEYS = {
    "packs_per_step": "global_batch_size",
    "checkpoints.in_background": "checkpoints.async_save",
    "data.max_bad_share": "data.max_failed_share",
    "data.plan_ahead_steps": "data.order_ahead_steps",
    "faults.on_bad_step": "faults.on_anomalous_step",
    "model.folder": "model.directory",
}

OPTIONS = {
    "--packs-per-step": "--global-batch-size",
    "--rows": "--packs",
    "--shard-mb": "--max-file-mib",
}
