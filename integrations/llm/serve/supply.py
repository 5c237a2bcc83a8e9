"""Where each rank's model comes from: its own path, or the head, which sends what a bare machine needs of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hostring.integrations.llm.checkpoint.arriving import ArrivingFiles, announce, forget
from hostring.integrations.llm.checkpoint.shipped_files import CheckpointFiles, files_of
from hostring.launch.joining import offered_hosts
from hostring.shipping.arrival import Arrival, Arrived
from hostring.shipping.extents import Extent
from hostring.shipping.folder import ModelFolder, ShippedFile
from hostring.shipping.hashes import Hashes
from hostring.shipping.server import Sent, ShipServer, listen_on
from hostring.shipping.storage import models_home
from hostring.shipping.supplier import Supplier

SHIP_WAIT_S = 86_400.0  # how long ranks wait for one whose part of the model is on its way; a lost one is noticed
_SHOW_S = 5.0  # between two lines of progress


class Supply(Protocol):
    """How one rank comes to its model.

    Attributes:
        load_wait_s: how long the others may have to wait for this rank to load.
    """

    load_wait_s: float

    def told(self) -> Any:
        """What the head tells all ranks, as JSON has it."""

    def path(self, model: str, told: Any, rank: int) -> str:
        """Where this rank's model is. `model` is where the job says."""

    def counts(self) -> dict[str, int]:
        """Bytes that have arrived; empty where nothing is sent."""


class OwnModel:
    """Every rank has the model."""

    load_wait_s = 120.0

    def told(self) -> Any:
        return None

    def path(self, model: str, told: Any, rank: int) -> str:
        return model

    def counts(self) -> dict[str, int]:
        return {}


class Offer:
    """The head's: it has the model, and sends of it what others need. Close it."""

    load_wait_s = SHIP_WAIT_S

    def __init__(self, model: str, hosts: Sequence[str], secret: bytes) -> None:
        found = files_of(model)
        self._files, self._shown = found, dict[str, float]()
        self._server = ShipServer(listen_on(hosts), secret, Hashes(found.paths), self._show)
        self._model = model

    def told(self) -> Any:
        about = [[file.name, file.nbytes, file.lead_nbytes] for file in self._files.files]
        where = {"port": self._server.port, "model": str(Path(self._model).absolute())}
        return {**where, "files": about, "opened": self._files.opened, "id": _id_of(self._files)}

    def path(self, model: str, told: Any, rank: int) -> str:
        return model

    def counts(self) -> dict[str, int]:
        return {}

    def sent(self) -> dict[int, Sent]:
        """What each rank has got, by rank."""
        return self._server.sent()

    def close(self) -> None:
        self._server.close()

    def _show(self, sent: Sent) -> None:
        whole = sent.sent + sent.here >= sent.planned
        if whole or time.monotonic() - self._shown.setdefault(sent.who, time.monotonic()) > _SHOW_S:
            self._shown[sent.who] = time.monotonic()
            print(f"hostring: {sent}", file=sys.stderr, flush=True)


class Bare:
    """That of a machine that needs to have nothing of the model. Close it.

    Args:
        host: where the head is. home: of the cache; the user's when not given.
    """

    load_wait_s = SHIP_WAIT_S

    def __init__(self, host: str, secret: bytes, home: Path | None = None) -> None:
        self._host, self._secret, self._home = host, secret, home
        self._arrival: Arrival | None = None
        self._open = contextlib.ExitStack()
        self._shown = time.monotonic()

    def told(self) -> Any:
        return None

    def path(self, model: str, told: Any, rank: int) -> str:
        """Get what every rank needs to know of the model: its headers.

        Raises:
            ValueError: the head offers no model.
        """
        if not told:
            raise ValueError("the head of this cluster sends no model; start it with: hostring serve --machines")
        self._open.close()  # of an earlier group
        files = [ShippedFile(*fields) for fields in told["files"]]
        folder = ModelFolder((self._home or models_home()) / _folder_name(told), files)
        supplier = Supplier([(self._host, told["port"])], self._secret, rank, waiting=_say)
        arrival = Arrival(folder, supplier, _local(told, files), self._show)
        self._open.callback(arrival.close)
        arriving = ArrivingFiles(arrival, {folder.path_of(n).absolute(): n for n in range(len(files))})
        announce(arriving)
        self._open.callback(forget, arriving)
        leads = [Extent(n, 0, file.lead_nbytes) for n, file in enumerate(files)]
        arrival.plan(leads)
        arrival.read(leads)
        self._arrival = arrival
        return str(folder.folder / "model" / told["opened"])

    def counts(self) -> dict[str, int]:
        return {} if self._arrival is None else self._arrival.account().as_json()

    def close(self) -> None:
        self._open.close()

    def _show(self, arrived: Arrived) -> None:
        whole = arrived.shipped + arrived.cached + arrived.local >= arrived.planned
        if whole or time.monotonic() - self._shown > _SHOW_S:
            self._shown = time.monotonic()
            _say(str(arrived))


def offer(model: str) -> Offer:
    """The offer of the head of a cluster that was opened with a token.

    Raises:
        OSError: none of its addresses can be listened on. ValueError: a file that can't be read.
    """
    return Offer(model, offered_hosts(os.environ), os.environ.get("HOSTRING_SECRET", "").encode())


def _say(text: str) -> None:
    print(f"hostring: {text}", file=sys.stderr, flush=True)


def _id_of(files: CheckpointFiles) -> str:
    """Tells models apart that have the same name, by their headers. Pieces are compared by their hashes later."""
    found = hashlib.sha256()
    for file, path in zip(files.files, files.paths, strict=True):
        found.update(f"{file.name} {file.nbytes} {file.lead_nbytes}\n".encode())
        with path.open("rb") as opened:
            found.update(opened.read(file.lead_nbytes))
    return found.hexdigest()[:16]


def _folder_name(told: Any) -> str:
    """Of the model in the cache: readable, and a single name whatever the head says."""
    path = Path(str(told["model"]))
    stem = path.stem if path.suffix in (".gguf", ".safetensors") else path.name
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in stem).strip(".")
    return f"{plain[:80] or 'model'}-{int(str(told['id']), 16):016x}"


def _local(told: Any, files: Sequence[ShippedFile]) -> list[Path]:
    """The model's files on this machine where they are at the same place and have the same sizes."""
    model = Path(str(told["model"]))
    folder = model.parent if told["opened"] else model
    paths = [folder / file.name for file in files]
    here = all(path.is_file() and path.stat().st_size == file.nbytes for path, file in zip(paths, files, strict=True))
    return paths if here else []
