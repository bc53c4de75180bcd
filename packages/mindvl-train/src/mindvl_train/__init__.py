# SPDX-License-Identifier: Apache-2.0
"""Phases, loop, step, checkpoints and metrics: trains a MindVL model on any accelerator."""
