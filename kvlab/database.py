"""Layer 4: the SQLite file of a run: one writer with a lock, any number of readers, every error in one line.

Write-ahead mode lets others read while rounds are written and keeps what was committed through `kill -9`. While no
writer holds the file it is in SQLite's plain mode, so that it is one file that opens in a read-only folder too.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvlab.errors import RunError
from kvlab.rows import SCHEMA

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
FILE = "run.sqlite"
_MAGIC = b"SQLite format 3\0"

_APPLICATION_ID = int.from_bytes(b"kvlb", "big")
_SIDE_FILES = tuple(FILE + suffix for suffix in ("", "-wal", "-shm", "-journal"))
_MENDS = {
    "is full": "free space there",
    "readonly": "make the folder writable",
    "locked": "end the other program that holds the file",
    "I/O": "check the disk and its free space",
    "unable to open": "make the folder readable and writable",
}


def refuse_other_file(place: Path, known: str) -> None:
    """Raise RunError for a file that is no SQLite database and has not a name that a run or an export gives."""
    if not place.is_file() or place.name in (FILE, known):
        return
    with place.open("rb") as begin:
        if begin.read(len(_MAGIC)) != _MAGIC:
            raise RunError(f"{place} is neither a run nor an export; name the folder of one")


class Database:
    """The SQLite file of a run; made by `Database.write` or `Database.read`.

    Attributes:
        file: the SQLite file.
        writable: this is the one writer.
        notes: what was fallen back to, a sentence each.
    """

    def __init__(self, file: Path, writable: bool) -> None:
        self.file = file
        self.writable = writable
        self.notes: list[str] = []
        self._folder = file.parent
        self._connection: sqlite3.Connection | None = None
        self._mutex = threading.RLock()
        self._unlock = lambda: None

    @classmethod
    def write(cls, folder: Path) -> Database:
        """Open the folder's file as its one writer; an absent or empty folder gets a new one.

        Raises:
            RunError: for a folder that holds other files, is being written, or cannot be.
        """
        database = cls(folder / FILE, writable=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            database._lock()
            others = sorted(entry.name for entry in folder.iterdir() if entry.name not in _SIDE_FILES)
        except FileExistsError as error:
            raise RunError(f"{folder} is a file; choose a folder with another --out") from error
        except OSError as error:
            raise RunError(f"{folder}: {error.strerror}; choose another --out") from error
        try:
            if others and not database.file.exists():
                raise RunError(
                    f"{folder} holds other files ({others[0]}) and no run; choose an empty or absent folder as --out"
                )
            with database._one_line("opening it"):
                connection = sqlite3.connect(database.file, timeout=10, isolation_level=None, check_same_thread=False)
                database._connection = connection
                new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                if not new:
                    database._check_format(connection)
                if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                    database._note(f"{folder}: no write-ahead log on this filesystem, readers may have to wait")
                connection.execute("PRAGMA synchronous = NORMAL")
                if new:
                    with database.transaction("beginning it"):
                        for statement in SCHEMA:
                            connection.execute(statement)
                        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                        connection.execute(f"PRAGMA user_version = {FORMAT}")
        except BaseException:
            database.close()
            raise
        return database

    @classmethod
    def read(cls, file: Path) -> Database:
        """Open the file for reading, whether or not it is being written.

        Raises:
            RunError: for a file that is no run, or that a newer kvlab wrote.
        """
        database = cls(file, writable=False)
        with database._one_line("opening it"):
            try:
                database._connect_reading().close()
            except sqlite3.OperationalError:
                if os.access(database._folder, os.W_OK) and os.access(file, os.R_OK):
                    raise
                # A log left behind needs an index beside it, which a read-only folder has no room for.
                database._read_copy()
                database._connect_reading().close()
        return database

    @contextmanager
    def transaction(self, doing: str) -> Iterator[sqlite3.Connection]:
        """Write all or nothing, whatever ends the block: an error, an interrupt, a kill.

        Args:
            doing: for the message, as in "storing round 3 of 'c'".
        """
        if not self.writable:
            raise RunError(f"{self._folder} is open for reading; Run.create opens it for writing")
        connection = self._connection
        if connection is None:
            raise RunError(f"{self._folder} is closed; Run.create opens it again")
        if not self.file.exists():  # SQLite would go on writing into the deleted file
            raise RunError(f"{self.file} was deleted while {doing}; run the command again to begin anew")
        with self._mutex, self._one_line(doing):
            if connection.in_transaction:  # a second interrupt cut the rollback of the first short
                connection.execute("ROLLBACK")
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Read one state of the file, that of the moment of the first query."""
        with self._mutex, self._one_line("reading it"):
            own = self._connection
            # A lasting connection would keep the writer from folding its log into the file.
            connection = own or self._connect_reading()
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if own is None:
                    connection.close()

    def close(self) -> None:
        """Fold the log into the file and give up the lock; closing twice is harmless."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # With readers about, or on a full disk, the log stays: the next open reads it.
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA busy_timeout = 500")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                connection.execute("PRAGMA journal_mode = DELETE")
            connection.close()
        self._unlock()

    def _lock(self) -> None:
        """Lock the folder until `close` or the end of the process, however it ends."""
        if fcntl is None:
            self._note(f"{self._folder}: this system has no folder locks; start no second writer")
            return
        descriptor = os.open(self._folder, os.O_RDONLY)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise RunError(
                f"{self._folder} is being written by another process; wait for it, or choose another --out"
            ) from error
        except OSError as error:
            self._note(f"{self._folder}: no locks on this filesystem ({error.strerror}); start no second writer")

    def _connect_reading(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.file.absolute().as_uri()}?mode=ro",
            uri=True,
            timeout=10,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise RunError(f"no run at {self._folder}; it ended before it began, so run the command again")
            self._check_format(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_copy(self) -> None:
        copy = Path(tempfile.mkdtemp(prefix="kvlab-"))
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        try:
            for name in (self.file.name, f"{self.file.name}-wal"):
                if (self._folder / name).exists():
                    shutil.copyfile(self._folder / name, copy / name)
        except OSError as error:
            raise RunError(f"{self.file}: {error.strerror}; make it readable") from error
        self.file = copy / self.file.name
        self._note(f"{self._folder} is read-only and its log unmerged: read from a copy, as of now")

    def _check_format(self, connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
            raise RunError(f"{self.file} is another program's SQLite file; choose the folder of a run")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > FORMAT:
            raise RunError(f"{self.file} has table format {version}, this kvlab knows {FORMAT}; upgrade kvlab")

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        warnings.warn(sentence, stacklevel=4)

    @contextmanager
    def _one_line(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            mend = next((mend for word, mend in _MENDS.items() if word in str(error)), None)
            if self.writable and mend:
                mend = f"finished rounds are kept: {mend}, then the same command resumes"
            mend = mend or "the file is damaged: restore it from a copy, or remove the folder and run again"
            raise RunError(f"{self._folder}: {error} while {doing}; {mend}") from error
