# SPDX-License-Identifier: Apache-2.0
"""Decontamination: find records that share text or images with benchmark files."""
