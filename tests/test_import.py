"""`import hostring` is cheap and drags nothing heavy along; torch comes only with whoever uses it."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "transformers", "matplotlib", "typer", "rich", "starlette", "gguf", "tokenizers", "asyncio", "jinja2")


def fresh(code: str) -> dict:
    """Run `code` in a new interpreter; it leaves a dict in `result`."""
    script = f"import json, sys, time\nresult = {{}}\n{code}\nprint(json.dumps(result))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def loaded(code: str) -> set[str]:
    found = fresh(code + "\nresult['modules'] = sorted({m.partition('.')[0] for m in sys.modules})")["modules"]
    return set(found) & set(HEAVY)


def test_nothing_heavy_is_imported():
    assert loaded("import hostring") == set()
    assert loaded("import hostring\nfor name in hostring.__all__: getattr(hostring, name)") == set()


def test_the_process_that_starts_the_demo_leaves_torch_to_its_ranks():
    assert "torch" not in loaded("import hostring.integrations.llm.demo.start")


def test_a_world_of_one_works_without_torch():
    code = """
import hostring, numpy
comm = hostring.init()
result['sum'] = comm.all_reduce(numpy.ones(3)).tolist()
comm.close()
"""
    assert loaded(code) & {"torch", "transformers", "matplotlib"} == set()
    assert fresh(code)["sum"] == [1.0, 1.0, 1.0]


def test_the_first_group_imports_only_what_it_needs():
    """They took half of the CPU time that hostring's own part of a first group took."""
    code = """
import threading
import hostring
from hostring.rendezvous import MemoryStore
store = MemoryStore()
ranks = [threading.Thread(target=lambda r=r: hostring.init(r, 2, store=store).close()) for r in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
needless = "asyncio concurrent.futures statistics tempfile shutil bz2 lzma hostring.cost.network hostring.tuning.tables"
needless += " hostring.group.rebuild hostring.group.ring_file hostring.store.server hostring.store.job_file"
result["needless"] = [name for name in needless.split() if name in sys.modules]
"""
    assert fresh(code)["needless"] == []


def test_importing_takes_less_time_than_importing_numpy():
    """The figure in the README is under 100 ms; a shared machine can only be held to a comparison."""
    code = """
start = time.perf_counter()
import hostring
middle = time.perf_counter()
import numpy
result['hostring'], result['numpy'] = middle - start, time.perf_counter() - middle
"""
    runs = [fresh(code) for _ in range(3)]
    assert min(r["hostring"] for r in runs) < min(r["numpy"] for r in runs)


def test_every_public_name_is_there():
    code = """
import hostring
result['missing'] = [name for name in hostring.__all__ if not hasattr(hostring, name)]
result['unknown'] = hasattr(hostring, 'no_such_name')
"""
    assert fresh(code) == {"missing": [], "unknown": False}
