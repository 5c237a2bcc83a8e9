"""Random collectives under random deaths: `python benchmarks/soak.py --minutes 20`.

Ranks are processes. Each computes, from the same seeds, what every rank contributes, and compares every result with
numpy's, bit for bit. Now and then one is killed (SIGKILL) and started again; the survivors rebuild the group with it.
One rank is spared, so that its memory and its descriptors tell of all operations. The last line is the summary; the
exit code is 0 when nothing was wrong and nothing hung.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from soak_board import FIELDS, Board, size_of
from soak_rank import WARM, work

from hostring.store.server import StoreServer
from hostring.transports.tcp import listen_at

SPARED = 1
HANG_SECONDS = 150.0  # more than any wait that has an end


class Soak:
    """Starts, kills and watches the ranks."""

    def __init__(self, ranks: int, seed: int, folder: str, log: Any) -> None:
        self.ranks, self.seed, self.log = ranks, seed, log
        self.board_path = os.path.join(folder, "board")
        with open(self.board_path, "wb") as file:
            file.write(bytes(size_of(ranks)))
        self.board = Board(self.board_path, ranks)
        self.secret = secrets.token_hex(16)
        self.server = StoreServer([listen_at("127.0.0.1", 0)], self.secret.encode())
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.kills = self.rejoins = self.restarts = self.wrong = self.hangs = 0
        self.before = [0] * ranks  # operations of a rank's earlier lives
        self.memory: list[int] = []  # of the spared rank, once it was warm
        for rank in range(ranks):
            self.start(rank, False)

    def start(self, rank: int, again: bool) -> None:
        row = self.board.read(rank)
        self.before[rank] += row["operations"]
        self.wrong += row["wrong"]
        self.board.write(rank, dict.fromkeys(FIELDS, 0))
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "HOSTRING_STORE": f"127.0.0.1:{self.server.port}",
            "HOSTRING_SECRET": self.secret,
            "HOSTRING_REJOIN": str(int(again)),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        place = ["--worker", self.board_path, "--ranks", str(self.ranks), "--seed", str(self.seed)]
        command = [sys.executable, __file__, *place]
        self.processes[rank] = subprocess.Popen(command, env=environment, stderr=self.log)

    def run(self, seconds: float, pause: float) -> None:
        rng = random.Random(self.seed)
        self.until_all_work()
        end = time.monotonic() + seconds
        beats, seen = self.beats(), time.monotonic()
        next_kill = time.monotonic() + pause
        healthy_since: list[int] = self.beats()
        while time.monotonic() < end and not self.hangs and not self.wrong:
            time.sleep(0.05)
            now = self.beats()
            if now != beats:
                beats, seen = now, time.monotonic()
            elif time.monotonic() - seen > HANG_SECONDS:
                self.hung()
                break
            self.revive()
            spared = self.board.read(SPARED)
            if spared["operations"] > WARM:
                self.memory.append(spared["rss"])
            whole = all(b > a for a, b in zip(healthy_since, now, strict=True))
            if time.monotonic() > next_kill and (whole or (self.kills and rng.random() < 0.002)):
                victim = rng.choice([r for r in range(self.ranks) if r != SPARED])
                self.processes[victim].kill()
                self.processes[victim].wait()
                self.kills += 1
                time.sleep(rng.choice((0.0, 0.0, 0.3)))
                self.start(victim, True)
                self.rejoins += 1
                healthy_since = self.beats()
                next_kill = time.monotonic() + rng.expovariate(1 / pause)
        self.finish()

    def until_all_work(self) -> None:
        """The minutes count from here on."""
        give_up = time.monotonic() + HANG_SECONDS
        while (
            not all(self.beats())
            and time.monotonic() < give_up
            and all(p.poll() is None for p in self.processes.values())
        ):
            time.sleep(0.05)
        if not all(self.beats()):
            self.hung()

    def beats(self) -> list[int]:
        return [self.board.read(r)["beat"] for r in range(self.ranks)]

    def revive(self) -> None:
        """A rank that came back into a group which then died again gives up; whoever runs it starts it once more."""
        for rank, process in self.processes.items():
            if process.poll() is not None:
                self.wrong += self.board.read(rank)["wrong"]
                self.restarts += 1
                self.start(rank, True)

    def hung(self) -> None:
        self.hangs += 1
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)

    def finish(self) -> None:
        self.board.stop = True
        give_up = time.monotonic() + HANG_SECONDS
        while not self.hangs and any(p.poll() is None for p in self.processes.values()):
            time.sleep(0.05)
            if time.monotonic() > give_up:
                self.hung()
            for rank, process in self.processes.items():
                if process.poll():  # it gave up while the others rebuild, and they wait for it
                    self.restarts += 1
                    self.start(rank, True)
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.server.close()

    def summary(self, seconds: float) -> str:
        rows = [self.board.read(r) for r in range(self.ranks)]
        wrong = self.wrong + sum(row["wrong"] for row in rows)
        operations = [row["operations"] + old for row, old in zip(rows, self.before, strict=True)]
        spared = rows[SPARED]
        quarter = len(self.memory) // 4
        growth = (max(self.memory[3 * quarter :]) - max(self.memory[quarter : 2 * quarter])) / 1e6 if quarter else 0.0
        return (
            f"soak: {seconds:.0f} s, ranks={self.ranks} ops={operations[SPARED]} results={sum(operations)} "
            f"kills={self.kills} rejoins={self.rejoins} rebuilds={spared['rebuilds']} restarts={self.restarts} "
            f"wrong={wrong} hangs={self.hangs} "
            f"rss_growth={growth:.1f} MB (last quarter over second) rss={spared['rss'] / 1e6:.0f} MB "
            f"fds={spared['fds_warm']}->{spared['fds']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between deaths")
    parser.add_argument("--log", help="file for what the ranks say")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.ranks, args.seed)
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hr-soak-") as folder, open(args.log or os.devnull, "wb") as log:
        soak = Soak(args.ranks, args.seed, folder, log)
        soak.run(args.minutes * 60, args.pause)
        print(soak.summary(time.monotonic() - started), flush=True)
    return int(bool(soak.wrong or soak.hangs))


if __name__ == "__main__":
    sys.exit(main())
