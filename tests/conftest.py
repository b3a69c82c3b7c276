"""Fixtures that every folder of tests may use."""

import os

# Before torch is loaded anywhere: threads that spin while they wait starve the worker processes beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

pytest_plugins = ["tests.support.server", "tests.support.command"]
