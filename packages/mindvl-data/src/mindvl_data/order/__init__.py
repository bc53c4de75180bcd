# SPDX-License-Identifier: Apache-2.0
"""Which sample is used when: a pure function of index, configuration, seed and position.

Ranks and restarts may have other versions of Python and numpy, so nothing here depends on them: no random generator,
no `hash`, no order of a set; floats are combined one operation at a time (IEEE 754 rounds each of them correctly) and
added up by `math.fsum` only. What changes the order raises `ORDER_VERSION` in tracker.py, which every state records.
"""
