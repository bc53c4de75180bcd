# SPDX-License-Identifier: Apache-2.0
"""Fault detection: anomalous steps, stuck ranks, slow ranks."""
