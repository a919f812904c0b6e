"""What the sources must not do: run text as code, reach for the network, write fixed files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = [
    ROOT / "setup.py",
    ROOT / "build_backend.py",
    *sorted((ROOT / "python").rglob("*.py")),
]
ALL = [
    *SHIPPED,
    *sorted(p for f in ("bench", "examples", "tests") for p in (ROOT / f).rglob("*.py")),
]
NETWORK = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_is_run_as_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            assert name not in RUNS_TEXT, f"line {node.lineno}: {name}()"
            attribute = node.func.attr if isinstance(node.func, ast.Attribute) else None
            assert attribute != "mktemp", f"line {node.lineno}: tempfile.mktemp()"
            for keyword in node.keywords:
                shell = keyword.arg == "shell" and getattr(keyword.value, "value", True)
                assert not shell, f"line {node.lineno}: a command for a shell"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_shipped_knows_no_network_and_no_fixed_files(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert not NETWORK & set(_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not node.value.startswith(("/tmp", "/var/tmp", "/dev/shm")), node.lineno


def test_import_reaches_for_nothing() -> None:
    """No connection, no process, and no file opened to be written."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, torch\n"
            "FORBIDDEN = ('socket.', 'urllib.', 'subprocess.', 'os.system', 'os.exec', 'os.fork',\n"
            "             'os.posix_spawn', 'os.mkdir', 'os.remove', 'os.rename', 'shutil.')\n"
            "def hook(event, arguments):\n"
            "    writes = event == 'open' and any(c in str(arguments[1] or '') for c in 'wax+')\n"
            "    if writes or event.startswith(FORBIDDEN):\n"
            "        print(event, arguments, flush=True)\n"
            "sys.dont_write_bytecode = True\n"
            "sys.addaudithook(hook)\n"
            "import fastnorm\n"
            "fastnorm.functional.layer_norm(torch.ones(2, 3), [3])\n",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == ""
