"""A worker's process spares the cyclic collector what is there for good, and still finds what others leave behind."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, sys, weakref
from headrace.worker.interpreter import settle_interpreter

class Ring:
    pass

def ring():
    made = Ring()
    made.itself = made
    return weakref.ref(made)

before = ring()
settle_interpreter()
assert before() is None, "what was rubbish by then is not kept for good"
assert sys.getswitchinterval() < 0.001, "the loop is not kept waiting"
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
runs = sum(each["collections"] for each in gc.get_stats())
for _ in range(300):
    step = [[token] for token in range(2000)]  # as a step does: made, used, gone
    del step
assert sum(each["collections"] for each in gc.get_stats()) == runs, gc.get_stats()
rubbish = [ring() for _ in range(60_000)]
assert any(each() is None for each in rubbish), "cycles are still found"
"""


def test_steps_are_not_looked_at_and_cycles_are_found() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
