# SPDX-License-Identifier: Apache-2.0
"""The logs of a run and of the runs from which it was branched, oldest first, as spans of lines.

Between the audit log and verify.py. A branch names its parent's log; without that log the earlier steps are missing.
"""

from dataclasses import replace
from pathlib import Path

from mindvl_data.audit_lines import AuditLine, is_closed, read_log
from mindvl_data.errors import DataError
from mindvl_data.ledger.account import Link, records_beside
from mindvl_data.ledger.replay import LogSpan
from mindvl_data.log_parts import log_files

_MOST_PARENTS = 100


def chain_of(own: Link, parent_log: Path | None) -> tuple[list[Link], list[str]]:
    """The logs in order, the run's own last, and a message for every missing log.

    Args:
        parent_log: Log of the parent of `own`; overrides the log named by its branch.

    Raises:
        DataError: The run's own log cannot be read.
    """
    links, problems = [own], []
    while (mark := _branch_at_start(links[0])) is not None:
        named = parent_log if len(links) == 1 and parent_log is not None else None
        if named is None and mark.parent is not None:
            named = links[0].audit_log.parent / mark.parent
        if (
            named is None
            or len(links) > _MOST_PARENTS
            or any(named.resolve() == link.audit_log.resolve() for link in links)
        ):
            problems.append(
                f"{mark.where}: the branch names no parent log with steps 1 to {mark.step}. Pass the log of the parent."
            )
            break
        parent = replace(records_beside(named), until=mark.step)
        try:
            next(read_log(parent.audit_log), None)
        except DataError as error:
            problems.append(
                f"{mark.where}: steps 1 to {mark.step} are in the parent's log, which cannot be read: {error}"
            )
            break
        links.insert(0, parent)
    return links, problems


def spans_of(link: Link) -> list[LogSpan]:
    """The files of a log, limited to the lines of the chain.

    Raises:
        DataError: A part is missing.
    """
    return [
        LogSpan(file=file, is_closed=is_closed(link.audit_log, file), until=link.until)
        for file in log_files(link.audit_log)
    ]


def _branch_at_start(link: Link) -> AuditLine | None:
    """The branch mark at the beginning of a log without the first steps; None if the log has them."""
    line = next(read_log(link.audit_log), None)
    return line if line is not None and line.kind == "branch" and line.branch == 0 else None
