"""Many clients that come and go: `python benchmarks/serve_soak.py MODEL --minutes 10 -- --same-bits`.

    python benchmarks/serve_soak.py MODEL --ranks 4 --kill-every 15 -- --plan pp=2,tp=2 --replay --same-bits

First every request is answered alone. Then clients ask for the same ones beside each other, and some go away before
the end: before the first byte, after a while, or after some text. Every text that comes whole must be the one that was
written alone, and every other one its beginning. At the end no slot is taken, and neither memory nor descriptors have
grown. Arguments after `--` go to `hostring serve`. Without `--same-bits`, rounding may depend on company: texts may
differ then, and are counted. With `--kill-every`, a rank other than the head is killed or stopped now and then, and
comes back: what was broken off then must be the beginning of the right text, and no client may hang. The last line is
the summary; the exit code is 0 when nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from serve_process import Server, Taken
from serve_requests import Asked, Broken, Connection, answer, varied_requests

CANCELLED_SHARE = 0.35
MAX_GROWTH_BYTES = 24 << 20  # of all ranks together, from half of the time to the end
MAX_SHOWN = 5  # wrong texts
RETRY_S = 0.3
HANGS_S = 150.0  # a client that has not ended so long after the others were told to


class Soak:
    """Clients and what they found."""

    def __init__(self, url: str, asked: list[Asked], alone: list[str], seed: int, kills: bool) -> None:
        self.url, self.asked, self.alone, self.seed, self.kills = url, asked, alone, seed, kills
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def client(self, number: int, until: float) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while time.monotonic() < until:
            index = rng.randrange(len(self.asked))
            try:
                how, text = self._ask(self.asked[index], rng)
            except (Broken, OSError) as exc:
                how, text = "errors", ""
                with self._lock:
                    self.errors.append(repr(exc))
            with self._lock:
                self.counts[how] += 1
                self._check(index, how, text)

    def _check(self, index: int, how: str, text: str) -> None:
        alone = self.alone[index]
        right = text == alone if how == "whole" else alone.startswith(text)
        if not right:
            self.counts["wrong"] += 1
            self.wrong.append({**asdict(self.asked[index]), "how": how, "alone": alone, "text": text})

    def _ask(self, asked: Asked, rng: random.Random) -> tuple[str, str]:
        """How it ended, and the text that came."""
        goes = rng.random() < CANCELLED_SHARE
        connection = Connection(self.url, asked)
        text = ""
        try:
            if goes and (not asked.streams or rng.random() < 0.3):
                time.sleep(rng.choice((0.0, 0.01, 0.1, 0.5)))
                return "gone", ""
            wanted = rng.randrange(1, 20) if goes else None
            for count, piece in enumerate(connection.pieces(), 1):
                text += piece.text
                if count == wanted:
                    return "gone", text
            return "whole", text
        except Broken:
            if not self.kills:
                raise
            time.sleep(RETRY_S)  # while the group is rebuilt
            return "broken off", text
        finally:
            connection.close()


def kill_now_and_then(server: Server, ranks: int, every: float, until: float, seed: int) -> None:
    """Kill or stop a rank other than the head, once the group is whole again."""
    rng = random.Random(seed)
    while time.monotonic() + every < until:
        time.sleep(every)
        if server.state("/health").get("status") == "ok":
            rank, number = rng.randrange(1, ranks), rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            print(f"rank {rank} gets {number.name}", file=sys.stderr)
            server.signal(rank, number)


def watched(server: Server, seconds: float, every: float) -> list[Taken]:
    """What the ranks take, while clients run."""
    found, until = [], time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(every, left))
        found.append(server.taken())
        print(f"{seconds - left:6.0f} s  {found[-1]}", file=sys.stderr)
    return found


def faults(server: Server, soak: Soak, taken: list[Taken], must_match: bool) -> list[str]:
    """What is wrong, in words."""
    found = [f"{soak.counts['wrong']} wrong texts"] if soak.wrong and must_match else []
    found += [f"{len(soak.errors)} errors: {soak.errors[:MAX_SHOWN]}"] if soak.errors else []
    if not server.until_idle():
        found.append(f"slots are taken: {server.state('/health')}")
    if soak.kills:  # processes that were started again take what they take
        return found
    early, late = taken[len(taken) // 2], taken[-1]
    if late.rss_bytes - early.rss_bytes > MAX_GROWTH_BYTES:
        found.append(f"memory grew by {late.rss_bytes - early.rss_bytes} bytes")
    idle = server.taken()
    if idle.kv_bytes > early.kv_bytes:
        found.append(f"KV caches grew from {early.kv_bytes:.0f} to {idle.kv_bytes:.0f} bytes")
    if idle.descriptors > early.descriptors or idle.threads > early.threads:
        found.append(f"descriptors or threads grew: {early} to {idle}")
    return found


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Ours, and those of `hostring serve`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=80, help="different ones")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds between two ranks that are lost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", help="a file for the texts that were other ones, as JSON lines")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]


def main() -> int:
    given, serve = arguments()
    asked = varied_requests(given.requests, given.seed)
    with Server(given.model, "--local", str(given.ranks), *serve) as server:
        alone = [answer(server.url, one) for one in asked]
        again = [answer(server.url, one) for one in asked]
        unsteady = sum(a != b for a, b in zip(alone, again, strict=True))
        soak = Soak(server.url, asked, alone, given.seed, given.kill_every > 0)
        seconds = 60 * given.minutes
        until = time.monotonic() + seconds
        clients = [threading.Thread(target=soak.client, args=(n, until), daemon=True) for n in range(given.clients)]
        for client in clients:
            client.start()
        if soak.kills:
            how = (server, given.ranks, given.kill_every, until, given.seed)
            threading.Thread(target=kill_now_and_then, args=how, daemon=True).start()
        taken = watched(server, seconds, max(1.0, seconds / 40))
        late = time.monotonic() + HANGS_S
        for client in clients:
            client.join(max(0.0, late - time.monotonic()))
        found = faults(server, soak, taken, "--same-bits" in serve)
        found += [f"{n} clients hang" for n in [sum(client.is_alive() for client in clients)] if n]
        metrics = {name: value for name, value in server.metrics().items() if name.startswith("hostring_texts_total")}
    if given.wrong:
        with open(given.wrong, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in soak.wrong)
    for one in soak.wrong[:MAX_SHOWN]:
        print(json.dumps(one), file=sys.stderr)
    summary = {**soak.counts, "unsteady alone": unsteady, "first": asdict(taken[0]), "last": asdict(taken[-1])}
    print(json.dumps({**summary, **metrics, "faults": found}))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
