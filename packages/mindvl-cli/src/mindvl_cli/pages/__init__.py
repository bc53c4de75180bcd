# SPDX-License-Identifier: Apache-2.0
"""Self-contained pages: charts as inline SVG, one style, and the pages of commands that have no directory of their own."""
