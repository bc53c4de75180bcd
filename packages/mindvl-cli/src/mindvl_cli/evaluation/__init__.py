# SPDX-License-Identifier: Apache-2.0
"""Score exported models: benchmark files in, predictions, scores and pages out. Used by `mindvl eval` and the demo."""
