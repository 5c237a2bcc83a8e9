"""The head's HTTP server: uvicorn on a thread of its own, so that steps and clients don't wait for each other."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection

import uvicorn

from hostring.integrations.llm.serve.http.app import make_app
from hostring.integrations.llm.serve.http.guard import TimedProtocol
from hostring.integrations.llm.serve.http.service import Service

MAX_HEADER_BYTES = 32 << 10
_IDLE_S = 30.0  # how long a connection may stay open without a request
_END_WAIT_S = 0.5  # how long close() waits for streams to end


class HttpServer:
    """Takes a port at once; answers after `start`.

    Args:
        port: 0 takes a free one.
        cores: where the thread may run; where the caller may when None.

    Raises:
        OSError: the port is taken, or the host is none of this machine.
    """

    def __init__(self, host: str, port: int, cores: Collection[int] | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=512)
        except OSError as exc:
            raise OSError(f"can't listen on {host} port {port}: {exc.strerror or exc}; try another --port") from exc
        self._cores = cores
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"

    def start(self, service: Service) -> None:
        """Answer requests from now on."""
        config = uvicorn.Config(
            make_app(service),
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(_IDLE_S),
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="hostring-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cores)  # of this thread alone
        assert self._server is not None
        self._server.run([self._socket])

    def close(self) -> None:
        """Let streams end, and give the port back."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_END_WAIT_S)
        self._socket.close()
