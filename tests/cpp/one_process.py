"""A C++ library linked to libfastnorm and Python's fastnorm, in one process and in either order.

python one_process.py CONSUMER LIBFASTNORM consumer | python
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import torch


def load_consumer(path: str) -> ctypes.CDLL:
    consumer = ctypes.CDLL(path)
    consumer.sum_of_squares.restype = ctypes.c_double
    consumer.sum_of_squares.argtypes = [ctypes.c_int64]
    return consumer


def loaded_libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if line.endswith("libfastnorm.so")}


def load_by_path(library: str) -> str:
    """Load a copy of the library beside Python's fastnorm by its path; return what it says."""
    program = "import sys, ctypes, fastnorm; ctypes.CDLL(sys.argv[1]); print('loaded')"
    result = subprocess.run(
        [sys.executable, "-c", program, library], capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr


consumer_path, library, first = sys.argv[1:]
consumer = load_consumer(consumer_path) if first == "consumer" else None
import fastnorm  # noqa: E402

if consumer is None:
    consumer = load_consumer(consumer_path)

# The right results, through one and the same library.
n = 1000
x = torch.arange(n, dtype=torch.float64)
assert abs(consumer.sum_of_squares(n) - n) < 1e-9 * n, consumer.sum_of_squares(n)
y = torch.ops.fastnorm.layer_norm(x, [n], None, None, 0.0)
assert abs(y.square().sum().item() - n) < 1e-9 * n, y.square().sum()
[loaded] = loaded_libraries()
own = Path(fastnorm.cmake_prefix_path, "lib", "libfastnorm.so")
expected = Path(library) if first == "consumer" else own
assert Path(loaded).samefile(expected), (loaded, expected)
print(f"fastnorm {fastnorm.__version__} and {consumer_path} share {loaded}")

# A second copy, loaded by its path, says what is wrong and registers nothing.
if not Path(library).samefile(own):
    answer = load_by_path(library)
    assert "already has fastnorm's operators" in answer, answer
    assert "Overriding" not in answer, answer
    assert "loaded" not in answer.splitlines(), answer
