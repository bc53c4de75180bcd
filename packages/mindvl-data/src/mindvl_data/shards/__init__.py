# SPDX-License-Identifier: Apache-2.0
"""What lies on disk or in an object store: tar shards, their index, and how both are written and read."""
