"""One process that a command starts and that ends with it, whatever ends the command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from hostring.launch.orphans import LAUNCHER

GRACE_S = 5.0  # how long the child has to end by itself after a signal
_TERMINAL_S = 1.0  # the same after Ctrl-C, which a terminal sends to both


def run_child(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a Python program, and wait for it.

    Ctrl-C reaches it from the terminal, or is passed on. SIGTERM is passed on, and raises SystemExit here.

    Returns:
        its exit code, negative for a signal; that of SIGINT after Ctrl-C.
    """
    with _terminated():
        child = subprocess.Popen([sys.executable, *argv], env={**environment, LAUNCHER: str(os.getpid())})
        try:
            return child.wait()
        except KeyboardInterrupt:
            _end(child, signal.SIGINT, _TERMINAL_S)
            return -signal.SIGINT
        except BaseException:
            _end(child, signal.SIGTERM, 0.0)
            raise


def _end(child: subprocess.Popen[bytes], number: int, before_s: float) -> None:
    """Wait `before_s` for a child to end by itself; then send it a signal, and kill it when that does not help."""
    try:
        for wait_s, then in ((before_s, number), (GRACE_S, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait_s)
                return
            child.send_signal(then)
    except KeyboardInterrupt:
        child.kill()
    child.wait()


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Let SIGTERM raise SystemExit. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
