# SPDX-License-Identifier: Apache-2.0
"""The commit is that of this checkout."""

from mindvl_train.metrics.commit import commit


def test_the_commit_is_that_of_this_checkout_or_nothing() -> None:
    found = commit()
    assert found == "" or (len(found) == 40 and int(found, 16) > 0)
