"""How ranks that an MPI launcher started on one host find the store when no address was given: through a file.

Only the user can enter its folder, and only files that belong to the user and to nobody else are believed.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable

from hostring.transports.addresses import Address


def folder() -> str:
    """A directory of this user's, made when it isn't there.

    Raises:
        OSError: another user has put something in its place.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = os.path.join(base if os.path.isdir(base) else tempfile.gettempdir(), f"hostring-{_user()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _check(os.lstat(path), path, stat.S_ISDIR)
    return path


def publish(job: str, address: Address, secret: bytes) -> str:
    """Write the file for `job`, in one piece. Returns its path, to be removed by the caller."""
    path = _path(job)
    descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(path))  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump({"host": address[0], "port": address[1], "secret": secret.hex()}, file)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return path


def find(job: str) -> tuple[Address, bytes]:
    """What `publish` wrote.

    Raises:
        LookupError: it is not there (yet).
        OSError: it is there and can't be trusted.
    """
    path = _path(job)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        raise LookupError("rank 0 has not written the store's address yet") from None
    with os.fdopen(descriptor, encoding="ascii") as file:
        _check(os.fstat(file.fileno()), path, stat.S_ISREG)
        try:
            found = json.load(file)
            return (str(found["host"]), int(found["port"])), bytes.fromhex(found["secret"])
        except (ValueError, KeyError, TypeError) as exc:
            raise LookupError(f"{path} can't be read: {exc}") from exc


def _path(job: str) -> str:
    return os.path.join(folder(), f"{job}.json")


def _user() -> str:
    return str(os.geteuid()) if hasattr(os, "geteuid") else os.environ.get("USERNAME", "user")


def _check(found: os.stat_result, path: str, kind: Callable[[int], bool]) -> None:
    if not hasattr(os, "geteuid"):  # Windows keeps a temporary directory for each user
        return
    if not kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} must belong to this user alone (it has mode {stat.filemode(found.st_mode)}, owner {found.st_uid})"
        )
