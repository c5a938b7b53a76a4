"""What every test gets: quiet neighbours, a seed, and no compiled code left over from the test before."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

# Before torch reads them. `pytest -n 2` runs a worker a core: more threads in each would only fight for the cores.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(THREADS))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Inductor believes what the CPU says of its vectors: to try them takes each process with a cache of its own 7 seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("FP8_COMPILE_CHECK", "1")  # passes/invariants.py: graphs are checked after every pass

import hypothesis
import pytest
import torch
import torch._dynamo.guards

import fp8_compile  # noqa: F401  caps oneDNN where its AMX path crashes: before any test's first matmul

# torch traces each compilation in full (every graph, every event) as soon as its trace log has a handler. pytest 9.2
# gives its own to each logger that does not propagate, so this one does; nothing reaches it then.
logging.getLogger("torch.__trace").propagate = True

# Dynamo times each set of guards once, for its own statistics, and empties the CPU's caches to do so: 20 ms.
torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0

# Compiling takes seconds, so a deadline an example says nothing; the same examples each run, so that a failure repeats.
hypothesis.settings.register_profile("fp8_compile", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("fp8_compile")


@pytest.fixture(autouse=True, scope="session")
def threads() -> None:
    torch.set_num_threads(THREADS)
    # Dynamo collects garbage after each compilation: what was imported is not looked at each time.
    gc.collect()
    gc.freeze()
    # Compilations make millions of objects, few of them in rings: it is enough to look for garbage less often.
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Each test compiles anew: no graph, recompile count or guard of the test before. Inductor's disk cache stays."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Random numbers are the same whichever tests ran before."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A source of random numbers of the test's own."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """For tests that run an MI300's graph on the CPU: where a CPU has AMX, oneDNN takes over `torch._scaled_mm` and
    refuses AMD's FP8 formats, which torch's own loop multiplies everywhere."""
    # Not torch.backends.mkldnn.flags: it warns of a GPU's settings.
    enabled = torch.backends.mkldnn.set_flags(False)[0]
    yield
    torch.backends.mkldnn.set_flags(enabled)


@pytest.fixture(scope="session")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One for all workers of pytest-xdist, so that the ranks are started once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two_ranks"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def ranks(ranks_folder: Any) -> Any:
    """What two ranks saw, by scenario."""
    from two_ranks import run_two_ranks

    with open(ranks_folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return run_two_ranks(ranks_folder)
