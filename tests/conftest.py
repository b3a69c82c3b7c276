"""Fixtures that every folder of tests may use."""

pytest_plugins = ["tests.support.server", "tests.support.command"]
