"""How far the kernels' results were from float64 in the interpreter: what tests/gpu has found, as a table."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path


def errors_table(folder: Path) -> str:
    """A table in Markdown of the files that the processes of tests/gpu have left in a folder; empty without any."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for file in sorted(folder.glob("*.json")):
        for what, of_type in json.loads(file.read_text()).items():
            for dtype, error in of_type.items():
                found[what, dtype] = max(found[what, dtype], error)
    if not found:
        return ""
    types = sorted({dtype for _, dtype in found})
    lines = [
        "",
        "Largest distance from a float64 reference, as a share of the largest value, in the interpreter (tests/gpu), "
        "by the type of the result:",
        "",
        f"| tests | {' | '.join(types)} |",
        f"|---|{'---:|' * len(types)}",
    ]
    for what in sorted({what for what, _ in found}):
        cells = (f"{found[what, dtype]:.1e}" if (what, dtype) in found else "–" for dtype in types)
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
