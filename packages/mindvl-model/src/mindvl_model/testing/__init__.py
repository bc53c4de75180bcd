# SPDX-License-Identifier: Apache-2.0
"""For tests of this and later packages: the smallest model, random weights, random packed packs."""
