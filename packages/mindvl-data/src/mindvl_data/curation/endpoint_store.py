# SPDX-License-Identifier: Apache-2.0
"""Answers of endpoints on disk, and the limits that all worker processes keep together: one SQLite database.

Used by endpoint.py. An answer is on disk before the step that asked for it receives it, so that a run that is killed at
any time never asks for it again. A request is admitted in one transaction that checks the cache, the requests in flight,
the rates and the budget; therefore the limits hold over all processes that use the same directory.

The database uses a write-ahead log, which works between processes of one machine: the directory must be on its disk.
"""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from mindvl_data.errors import DataError

_WINDOW_S = 60.0  # rates are per minute
_LOCK_WAIT_S = 120.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, endpoint TEXT, text TEXT, finish_reason TEXT, prompt_tokens INTEGER, completion_tokens INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS in_flight (
    key TEXT PRIMARY KEY, endpoint TEXT, owner TEXT, expires REAL, tokens INTEGER, cost REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent (endpoint TEXT, time REAL, key TEXT, tokens INTEGER);
CREATE INDEX IF NOT EXISTS sent_times ON sent (endpoint, time);
CREATE TABLE IF NOT EXISTS spent (endpoint TEXT PRIMARY KEY, requests INTEGER, tokens INTEGER, cost REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pauses (endpoint TEXT PRIMARY KEY, until REAL) WITHOUT ROWID;
"""


class BudgetError(DataError):
    """The budget of an endpoint is used up; the run stops and can be continued."""


@dataclass(frozen=True)
class Reply:
    """An answer of an endpoint.

    Attributes:
        text: The answer.
        finish_reason: "stop", or "length" if the answer was cut at the maximum number of tokens.
        prompt_tokens, completion_tokens: As the server counts them, or our estimate if it does not.
        cached: It was on disk already.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one endpoint; None means unlimited."""

    concurrency: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budget_requests: int | None = None
    budget_tokens: int | None = None
    budget_cost: float | None = None


@dataclass(frozen=True)
class Expected:
    """What a request may use, until its answer says what it has used."""

    tokens: int
    cost: float
    timeout_s: float


class AnswerStore:
    """The database in a directory; safe for several threads and processes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "endpoint-answers.sqlite"
        self._owners = directory / "endpoint-owners"
        self._owners.mkdir(exist_ok=True)
        self.owner = uuid4().hex
        # Locked until this process ends in any way, so that others see that its requests in flight are lost.
        self._owner_file = open(self._owners / self.owner, "wb")  # noqa: SIM115
        fcntl.flock(self._owner_file, fcntl.LOCK_EX)
        self._lock = threading.RLock()
        try:
            self._database = sqlite3.connect(
                self._path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise DataError(f"{self._path}: {error}. Check the disk, or use another directory.") from error

    def close(self) -> None:
        """Release the files; requests of this process that are in flight are given up."""
        self._database.close()
        self._owner_file.close()
        (self._owners / self.owner).unlink(missing_ok=True)

    def find(self, key: str) -> Reply | None:
        """The answer to a question that was asked before."""
        with self._lock:
            row = self._database.execute(
                "SELECT text, finish_reason, prompt_tokens, completion_tokens FROM answers WHERE key = ?", (key,)
            ).fetchone()
        return None if row is None else Reply(row[0], row[1], row[2], row[3], cached=True)

    def admit(self, key: str, endpoint: str, limits: Limits, expected: Expected, now: float) -> Reply | float:
        """Ask for permission to send a request.

        Returns:
            The answer if it is known by now; 0.0 if the request may be sent, which is then in flight until `answered` or
            `failed`; otherwise the seconds after which to try again.

        Raises:
            BudgetError: The budget does not allow the request.
        """
        with self._transaction(durable=False) as database:
            reply = self.find(key)
            if reply is not None:
                return reply
            row = database.execute("SELECT owner, expires FROM in_flight WHERE key = ?", (key,)).fetchone()
            if row is not None and self._is_alive(row[0], row[1], now):
                return 0.1
            wait = self._wait_for_limits(endpoint, limits, expected, now)
            if wait > 0:
                return wait
            database.execute(
                "INSERT OR REPLACE INTO in_flight VALUES (?, ?, ?, ?, ?, ?)",
                (key, endpoint, self.owner, now + expected.timeout_s + _WINDOW_S, expected.tokens, expected.cost),
            )
            database.execute("INSERT INTO sent VALUES (?, ?, ?, ?)", (endpoint, now, key, expected.tokens))
            self._spend(endpoint, 1, 0, 0.0)
        return 0.0

    def answered(self, key: str, endpoint: str, reply: Reply, cost: float) -> None:
        """Keep an answer on disk; it survives the end of this process and of the machine."""
        tokens = reply.prompt_tokens + reply.completion_tokens
        with self._transaction(durable=True) as database:
            database.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
                (key, endpoint, reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens),
            )
            self._end(key, endpoint, tokens, cost)

    def failed(self, key: str, endpoint: str, tokens: int, cost: float) -> None:
        """End a request without an answer, which may have been charged nevertheless."""
        with self._transaction(durable=False):
            self._end(key, endpoint, tokens, cost)

    def pause(self, endpoint: str, until: float) -> None:
        """Send nothing to the endpoint before this time, from any process."""
        with self._transaction(durable=False) as database:
            row = database.execute("SELECT until FROM pauses WHERE endpoint = ?", (endpoint,)).fetchone()
            if row is None or row[0] < until:
                database.execute("INSERT OR REPLACE INTO pauses VALUES (?, ?)", (endpoint, until))

    def spent(self, endpoint: str) -> tuple[int, int, float]:
        """Requests, tokens and cost of an endpoint over all runs that used this directory."""
        with self._lock:
            row = self._database.execute(
                "SELECT requests, tokens, cost FROM spent WHERE endpoint = ?", (endpoint,)
            ).fetchone()
        return row or (0, 0, 0.0)

    def _wait_for_limits(self, endpoint: str, limits: Limits, expected: Expected, now: float) -> float:
        database = self._database
        row = database.execute("SELECT until FROM pauses WHERE endpoint = ?", (endpoint,)).fetchone()
        if row is not None and row[0] > now:
            return row[0] - now
        flights = self._flights(endpoint, now)
        self._check_budget(endpoint, limits, expected, bool(flights))
        reserved_tokens = sum(tokens for tokens, _ in flights)
        reserved_cost = sum(cost for _, cost in flights)
        _, tokens, cost = self.spent(endpoint)
        if len(flights) >= limits.concurrency:
            return 0.05
        if flights and (
            (limits.budget_tokens is not None and tokens + reserved_tokens + expected.tokens > limits.budget_tokens)
            or (limits.budget_cost is not None and cost + reserved_cost + expected.cost > limits.budget_cost)
        ):
            return 0.1  # those in flight may use less than they reserve
        database.execute("DELETE FROM sent WHERE endpoint = ? AND time <= ?", (endpoint, now - _WINDOW_S))
        used = database.execute(
            "SELECT time, tokens FROM sent WHERE endpoint = ? ORDER BY time", (endpoint,)
        ).fetchall()
        return max(
            _rate_wait([(time, 1) for time, _ in used], 1, limits.requests_per_minute, now),
            _rate_wait(used, expected.tokens, limits.tokens_per_minute, now),
        )

    def _check_budget(self, endpoint: str, limits: Limits, expected: Expected, waits: bool) -> None:
        """Refuse a request that the budget does not allow even if all requests in flight used nothing."""
        for name, limit, used, wanted in zip(
            ("budget_requests", "budget_tokens", "budget_cost"),
            (limits.budget_requests, limits.budget_tokens, limits.budget_cost),
            self.spent(endpoint),
            (1, expected.tokens, expected.cost),
            strict=True,
        ):
            if limit is not None and used + wanted > limit:
                raise BudgetError(
                    f"endpoint {endpoint}: {name}: {used:.6g} of {limit:.6g} are used, and the next request may need "
                    f"{wanted:.6g}. All answers so far are kept: increase {name} and run the command again to continue."
                )

    def _flights(self, endpoint: str, now: float) -> list[tuple[int, float]]:
        """(tokens, cost) that requests in flight reserve; forgets those of processes that have ended."""
        alive = []
        for key, owner, expires, tokens, cost in self._database.execute(
            "SELECT key, owner, expires, tokens, cost FROM in_flight WHERE endpoint = ?", (endpoint,)
        ).fetchall():
            if self._is_alive(owner, expires, now):
                alive.append((tokens, cost))
            else:
                # The server may have charged the lost answer.
                self._database.execute("DELETE FROM in_flight WHERE key = ?", (key,))
                self._spend(endpoint, 0, tokens, cost)
        return alive

    def _is_alive(self, owner: str, expires: float, now: float) -> bool:
        if owner == self.owner:
            return True
        if expires < now:
            return False
        try:
            descriptor = os.open(self._owners / owner, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _end(self, key: str, endpoint: str, tokens: int, cost: float) -> None:
        self._database.execute("DELETE FROM in_flight WHERE key = ?", (key,))
        # From now on the rate counts what was used, not what was expected.
        self._database.execute(
            "UPDATE sent SET tokens = ? WHERE rowid = (SELECT max(rowid) FROM sent WHERE key = ?)", (tokens, key)
        )
        self._spend(endpoint, 0, tokens, cost)

    def _spend(self, endpoint: str, requests: int, tokens: int, cost: float) -> None:
        used = self.spent(endpoint)
        self._database.execute(
            "INSERT OR REPLACE INTO spent VALUES (?, ?, ?, ?)",
            (endpoint, used[0] + requests, used[1] + tokens, used[2] + cost),
        )

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        with self._lock:
            # Without a flush a commit survives the end of the process, but not of the machine.
            self._database.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            try:
                self._database.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                raise DataError(f"{self._path}: {error}. Check the disk, then run the command again.") from error
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException as error:
                if self._database.in_transaction:  # SQLite has ended it if the disk is full
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):  # stops the run; a record would be put into quarantine
                    raise DataError(f"{self._path}: {error}. Check the disk, then run the command again.") from error
                raise


def _rate_wait(used: list[tuple[float, int]], wanted: int, limit: int | None, now: float) -> float:
    """Seconds until `wanted` more is within the limit per minute; a request larger than the limit is sent alone.

    Args:
        used: (time, amount) within the last minute, by time.
    """
    total, wait = sum(amount for _, amount in used), 0.0
    if limit is None:
        return wait
    for time, amount in used:
        if total + wanted <= limit:
            break
        total -= amount
        wait = time + _WINDOW_S - now
    return wait
