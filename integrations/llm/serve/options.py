"""What `hostring serve` is asked to do, as plain values that travel to the rank processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hostring.integrations.llm.checkpoint.repository import model_name
from hostring.integrations.llm.demo.job import Job

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, to whom, and how much at a time.

    Attributes:
        job: the model, and how each rank computes it. What it says of prompts is not used.
        host, port: where to listen; port 0 takes a free one.
        name: the model's id for clients.
        api_keys: any of these lets a client in; empty where none is needed.
        streams: sequences that are computed at a time; each has its own KV cache.
        queue: sequences that wait for one of them; more are refused.
        context: positions of each KV cache; the model's own, but at most 4096, when None.
        allow_hosts: names by which clients may call this server, beside its own addresses.
        allow_origins: web pages of these origins may call it too.
        groups: of the texts that are written, each of which passes another stage of a pipeline meanwhile; as many as
            there are stages when None.
        replay: texts that a lost rank broke off go on when it is back, instead of ending in an error.
        step_limit_s: a prompt's part of one step is cut so that a step takes about so long, while others are written.
    """

    job: Job
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    api_keys: tuple[str, ...] = ()
    streams: int = 8
    queue: int = 64
    context: int | None = None
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    groups: int | None = None
    replay: bool = False
    step_limit_s: float = 0.2

    def __post_init__(self) -> None:
        if self.streams < 1 or self.queue < 0:
            raise ValueError(f"{self.streams} streams and a queue of {self.queue}: at least 1 and 0 are needed")
        if self.groups is not None and self.groups < 1:
            raise ValueError(f"{self.groups} groups of texts: at least 1 is needed")
        if self.host not in LOOPBACK and not self.api_keys:
            raise ValueError(
                f"--host {self.host} lets other machines in; give --api-key-file, a file with one key per line, or "
                "listen on 127.0.0.1"
            )

    @property
    def model_name(self) -> str:
        """The model's id for clients: what was said, or the name of the repository, file or folder."""
        return self.name or model_name(Path(self.job.model))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ServeOptions:
        fields = json.loads(text)
        job = Job.from_json(json.dumps(fields.pop("job")))
        lists = ("api_keys", "allow_hosts", "allow_origins")
        return ServeOptions(job, **{**fields, **{name: tuple(fields[name]) for name in lists}})


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys in a file, one per line; lines that start with # say nothing.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no key, or one that no HTTP header can carry.
    """
    if path is None:
        return ()
    if not path.is_file():
        raise FileNotFoundError(f"--api-key-file {path}: there is no such file; write one key per line into it")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"--api-key-file {path} holds no key; write one key per line into it")
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"--api-key-file {path}: key {number} has characters that no HTTP header can carry")
    return keys
