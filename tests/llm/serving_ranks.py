"""A server whose ranks are threads of the test."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from demo_jobs import job
from ranks import in_threads

from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.serving import Serving, serve_rank

DEADLINE_S = 60.0


@contextlib.contextmanager
def served(
    dtypes: tuple[str, ...] = ("float32",) * 3, *, how: dict[str, Any] | None = None, **options: Any
) -> Iterator[Serving]:
    """The bundled model behind HTTP, until the end of the block. `how`: changes of the job."""
    chosen = ServeOptions(replace(job(dtypes=dtypes), **how or {}), port=0, **options)
    found: list[Serving] = []
    came = threading.Event()

    def ready(serving: Serving) -> None:
        found.append(serving)
        came.set()

    failed: list[BaseException] = []

    def ranks() -> None:
        try:
            in_threads(len(dtypes), lambda comm: serve_rank(chosen, comm, "cpu", ready=ready), deadline=600.0)
        except BaseException as exc:
            failed.append(exc)
        came.set()

    thread = threading.Thread(target=ranks, daemon=True)
    thread.start()
    assert came.wait(DEADLINE_S)
    if failed:
        raise failed[0]
    try:
        yield found[0]
    finally:
        found[0].scheduler.end()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def ask(url: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, body (as JSON where it is) and headers of a request. `body` is JSON, or bytes that go as they are."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(url, data, names, method=method), timeout=DEADLINE_S) as response:
            status, text, found = response.status, response.read(), dict(response.headers)
    except HTTPError as exc:
        status, text, found = exc.code, exc.read(), dict(exc.headers)
    with contextlib.suppress(ValueError):
        return status, json.loads(text), found
    return status, text, found


def events(url: str, body: dict[str, Any]) -> list[str]:
    """The data of each server-sent event of an answer. Fails on anything that is none."""
    with urlopen(Request(url, json.dumps({**body, "stream": True}).encode()), timeout=DEADLINE_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        assert all(line.startswith(("data: ", "event: ")) for line in lines), event
        found += ["\n".join(line[6:] for line in lines if line.startswith("data: "))] if lines else []
    return found
