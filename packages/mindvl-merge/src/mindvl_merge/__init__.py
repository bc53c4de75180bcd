# SPDX-License-Identifier: Apache-2.0
"""What happens after training: average weights, score models, search the test-time resolution."""
