# SPDX-License-Identifier: Apache-2.0
"""Moves batches of records through the steps of a pipeline: parts of inputs, workers, files between steps, decisions."""
