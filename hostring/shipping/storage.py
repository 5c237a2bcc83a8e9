"""The folder of everything that this machine has been sent: where it is, what is in it, and how large it may become."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

DEFAULT_LIMIT_GB = 100.0
_LIMIT = "HOSTRING_CACHE_GB"
LOCK = "in-use"


@dataclass(frozen=True)
class CachedModel:
    """A model of which parts are here.

    Attributes:
        nbytes: on disk; holes take none. used: when it was last opened, in seconds since 1970.
    """

    folder: Path
    nbytes: int
    used: float

    @property
    def in_use(self) -> bool:
        """Whether a process has it open."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder, alone=True))
            except BlockingIOError:
                return True
        return False


def cache_home() -> Path:
    """Where this user's programs keep what can be had again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hostring"


def models_home() -> Path:
    """Where models are that were sent here."""
    return cache_home() / "models"


def limit_nbytes() -> int:
    """How large all models together may become.

    Raises:
        ValueError: HOSTRING_CACHE_GB is no number.
    """
    text = os.environ.get(_LIMIT) or str(DEFAULT_LIMIT_GB)
    try:
        return int(float(text) * 1e9)
    except ValueError:
        raise ValueError(f"{_LIMIT}={text!r}: expected how many GB the model cache may take, such as 50") from None


def cached_models() -> list[CachedModel]:
    """What is in the cache. The one that was used last is the first."""
    home = models_home()
    folders = [folder for folder in home.iterdir() if folder.is_dir()] if home.is_dir() else []
    found = []
    for folder in folders:
        stats = [file.stat() for file in folder.rglob("*") if file.is_file()]
        nbytes = sum(getattr(stat, "st_blocks", stat.st_size / 512) * 512 for stat in stats)
        found.append(CachedModel(folder, int(nbytes), max((stat.st_mtime for stat in stats), default=0.0)))
    return sorted(found, key=lambda model: -model.used)


def prune(keep_nbytes: int, spare: Path | None = None) -> list[CachedModel]:
    """Remove what was not used for longest, until `keep_nbytes` are left. What a process uses stays, and so does
    `spare`. Returns what was removed."""
    models = cached_models()
    total = sum(model.nbytes for model in models)
    removed = []
    for model in reversed(models):
        if total <= keep_nbytes:
            break
        if model.folder != spare and not model.in_use:
            shutil.rmtree(model.folder, ignore_errors=True)
            total -= model.nbytes
            removed.append(model)
    return removed


def make_room(folder: Path, nbytes: int) -> None:
    """Let `folder` grow by `nbytes`: other models make way for it.

    Raises:
        OSError: the disk has too little room, or the limit of the cache is too small.
    """
    limit = limit_nbytes()
    prune(max(0, limit - nbytes), spare=folder)
    here = sum(model.nbytes for model in cached_models())
    if here + nbytes > limit:
        raise OSError(
            f"the model's parts need {nbytes / 1e6:,.1f} MB more in {models_home()}, which has {here / 1e6:,.1f} MB "
            f"and may have {limit / 1e6:,.1f} MB; set {_LIMIT} to more, or run hostring cache prune"
        )
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(no_room(folder, nbytes, free))


def no_room(folder: Path, nbytes: int, free: int) -> str:
    """The error for a full disk."""
    return (
        f"the disk of {folder} is too full: the model's parts need {nbytes / 1e6:,.1f} MB more and {free / 1e6:,.1f} "
        "MB are free; run hostring cache prune, or set XDG_CACHE_HOME to a folder on another disk"
    )


@contextlib.contextmanager
def locked(folder: Path, alone: bool = False) -> Iterator[BinaryIO]:
    """Hold a folder of the cache, so that nobody prunes it.

    Raises:
        BlockingIOError: `alone` is wanted, and another process holds it.
    """
    with (folder / LOCK).open("ab") as file:
        with contextlib.suppress(ModuleNotFoundError):  # Windows, where open files can't be removed anyway
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        yield file
