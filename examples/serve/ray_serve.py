"""`hostring serve` on the nodes of a Ray cluster: a placement group with one bundle per node, and an actor in each.

    python ray_serve.py --nodes 2 /shared/model.gguf --host 0.0.0.0 --api-key-file /shared/keys.txt

Arguments that are not known here go to `hostring serve`. Ctrl-C ends all ranks. When a rank is lost, all end; run it
again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Machine:
    """Runs one rank, and is on the node of its bundle."""

    def address(self) -> tuple[str, int]:
        """Where ranks can meet here."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def serve(self, place: dict[str, str], arguments: list[str]) -> int:
        """The exit code of a rank. Ray ends it with this actor."""
        command = [sys.executable, "-m", "hostring", "serve", *arguments]
        return subprocess.run(command, env={**os.environ, **place}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="ranks, each on a node of its own")
    parser.add_argument("--cpus", type=float, default=1, help="that a rank takes of its node")
    parser.add_argument("--one-node", action="store_true", help="nodes may be the same one, to try it")
    own, arguments = parser.parse_known_args()
    ray.init()
    spread = "PACK" if own.one_node else "STRICT_SPREAD"
    group = placement_group([{"CPU": own.cpus}] * own.nodes, strategy=spread)
    ray.get(group.ready())
    bundles = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(own.nodes)]
    machines = [Machine.options(num_cpus=own.cpus, scheduling_strategy=bundle).remote() for bundle in bundles]
    host, port = ray.get(machines[0].address.remote())
    place = {"WORLD_SIZE": str(own.nodes), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    place["HOSTRING_SECRET"] = secrets.token_hex(16)
    arguments += ["--rejoin-timeout", "0"]
    ranks = [machine.serve.remote({**place, "RANK": str(n)}, arguments) for n, machine in enumerate(machines)]
    try:
        (ended, *_), _ = ray.wait(ranks)  # until one has ended
        return int(ray.get(ended))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
