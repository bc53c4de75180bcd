# SPDX-License-Identifier: Apache-2.0
"""The data order: a pure function of index, configuration, seed and position.

Ranks and restarts may use different versions of Python and numpy, so the order does not depend on them: no random
generator, no `hash`, no iteration over sets; floats are combined one operation at a time (IEEE 754 rounds each of them
correctly) and summed only by `math.fsum`. A change of the order raises `ORDER_VERSION` in tracker.py, which every state
records.
"""
