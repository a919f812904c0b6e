"""Devices that the tests run on, and the options and markers they know."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Processes of pytest-xdist share the cores: two with two threads each on two cores took twice the
# time of two with one.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
# Inductor's pool of compilers takes longer to start, and to end, than the few kernels of the tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Nor does each process try, in ten compilations and ten processes, which vector instructions the
# C++ compiler knows: the code around fastnorm's operators does without.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest
import torch
from hypothesis import HealthCheck, settings

import fastnorm
import fastnorm._C

sys.path.insert(0, str(Path(__file__).parent))

GIB = 1 << 30

# Of test_properties.py; --hypothesis-profile=long picks the other. FASTNORM_EXAMPLES: how many,
# where several processes share the long one.
settings.register_profile("quick", max_examples=250, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "long",
    max_examples=int(os.environ.get("FASTNORM_EXAMPLES", "20000")),
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("quick")


def why_no_cuda() -> str | None:
    """The reason why nothing can run on a GPU here, or None."""
    if fastnorm._C.build_info()["cuda"] is None:
        return "fastnorm was built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: runs on a CUDA device")
    config.addinivalue_line("markers", "large: needs a GPU with more than 100 GB of memory")
    config.addinivalue_line("markers", "slow: a minute and more; runs with -m slow alone")
    config.addinivalue_line(
        "markers", "sanitizer: small and quick CUDA shapes, for compute-sanitizer (-m sanitizer)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize(
            "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], scope="session"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.option.markexpr:
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("slow")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    reason = why_no_cuda()
    memory = 0 if reason else torch.cuda.get_device_properties(0).total_memory
    for item in items:
        if reason and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("large") and memory < 100 * GIB:
            item.add_marker(pytest.mark.skip(reason=reason or "needs more than 100 GB of memory"))


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """Each test starts from the same seed and leaves the number of threads as it found it."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _leave_memory_to_other_processes() -> Iterator[None]:
    """Whose tests run on the same GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > GIB:
        torch.cuda.empty_cache()


@pytest.fixture
def force() -> Iterator[Callable[..., None]]:
    """_C.force_plan, undone after the test."""
    yield fastnorm._C.force_plan
    fastnorm._C.force_plan()
