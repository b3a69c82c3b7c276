"""Where a model's files are: `demo` is the one that ships with the package."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from ..engine.json_file import find_folder
from .exit_codes import CommandError, ExitCode, UsageError

DEMO_MODEL = "demo"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_place(model: str, revision: str | None = None) -> str:
    """What the engine is to load: the folder of the model that ships for `demo`, anything else as it is.

    Raises CommandError if `model` can be neither a folder nor a name on the hub, and UsageError if it is none on the
    hub and has a `revision`: said before torch is loaded.
    """
    is_folder = model == DEMO_MODEL or find_folder(model) is not None
    if revision is not None and is_folder:
        raise UsageError(f"--revision (HEADRACE_REVISION) is for models of the hub; {model} is a folder: leave it out")
    if model != DEMO_MODEL:
        if not is_folder and not _HUB_NAME.fullmatch(model):
            raise CommandError(f"there is no folder {model}, and it is no hub id (owner/name)", ExitCode.MODEL)
        return model
    # A folder without Python code has several places, of which those of an editable installation are no folders.
    spec = find_spec("headrace.demo_model")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if Path(place, "config.json").is_file():
            return place
    raise CommandError("the demo model is not part of this installation", ExitCode.MODEL)
