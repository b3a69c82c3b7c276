"""The threads behind the compiled kernels: calls from several threads, after a fork, with any number of threads."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from headrace.kernels.backend import open_library
from headrace.kernels.cpu.library import CpuLibrary
from headrace.kernels.matrix import plain_matrix


@pytest.fixture
def library() -> CpuLibrary:
    found = open_library()
    if not isinstance(found, CpuLibrary):
        pytest.skip(f"no compiled kernels here: {found}")
    return found


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33])
def test_any_number_of_threads_gives_the_same(library: CpuLibrary, count: int) -> None:
    weight, x = library.pack(plain_matrix(numbers(600, 90, seed=0))), numbers(50, 90, seed=1)
    before = torch.get_num_threads()
    want = x.double() @ numbers(600, 90, seed=0).double().T
    try:
        torch.set_num_threads(count)
        for _ in range(20):
            assert (library.linear(x, weight).double() - want).abs().max() < 1e-4
    finally:
        torch.set_num_threads(before)


def test_two_python_threads_at_once(library: CpuLibrary, threads: int) -> None:
    # ctypes lets the other thread run: the second call finds the team busy and works alone
    weight, x = library.pack(plain_matrix(numbers(2000, 200, seed=0))), numbers(64, 200, seed=1)
    want = library.linear(x, weight)
    wrong: list[int] = []

    def call(name: int) -> None:
        wrong.extend(100 * name + turn for turn in range(40) if not torch.equal(library.linear(x, weight), want))

    running = [threading.Thread(target=call, args=(name,)) for name in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not any(thread.is_alive() for thread in running)
    assert not wrong


FORKS = """
import os, sys, torch
from headrace.kernels.backend import open_library
from headrace.kernels.matrix import plain_matrix
torch.set_num_threads(2)
library = open_library()
weight, x = library.pack(plain_matrix(torch.ones(300, 64))), torch.ones(32, 64)
assert (library.linear(x, weight) == 64).all()
for _ in range(5):
    child = os.fork()
    if child == 0:
        good = all(bool((library.linear(x, weight) == 64).all()) for _ in range(20))
        os._exit(0 if good else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert (library.linear(x, weight) == 64).all()
print("done")
"""


def test_a_child_of_a_fork_has_threads_of_its_own(library: CpuLibrary) -> None:
    assert run(FORKS) == "done\n"


THREADS = """
import os, signal, torch
from headrace.kernels.backend import open_library
library = open_library()
torch.set_num_threads(4)
x, weight = torch.ones(400, 400), torch.ones(400)
(x @ x).add(x).sum()  # torch's own threads have started
before = set(os.listdir("/proc/self/task"))
library.rms_norm(x, weight, 1e-5)
made = set(os.listdir("/proc/self/task")) - before
def blocked(thread):
    lines = dict(line.split(":\\t", 1) for line in open(f"/proc/self/task/{thread}/status").read().splitlines())
    mask = int(lines["SigBlk"], 16)
    return all(mask >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
print(len(made), [blocked(thread) for thread in made])
"""


def test_signals_are_not_for_the_threads(library: CpuLibrary) -> None:
    assert run(THREADS) == "3 [True, True, True]\n"


def run(code: str) -> str:
    """What a fresh interpreter prints; its errors fail the test."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
