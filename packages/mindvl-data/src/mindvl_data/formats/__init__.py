# SPDX-License-Identifier: Apache-2.0
"""Input formats of `mindvl data write`, one module per format; registry.py lists them."""
