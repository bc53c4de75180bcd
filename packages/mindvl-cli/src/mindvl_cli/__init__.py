# SPDX-License-Identifier: Apache-2.0
"""The mindvl command: one command per job, from raw images to an exported model."""
