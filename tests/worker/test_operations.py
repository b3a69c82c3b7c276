"""What stands in docs/operations.md, compose.yaml and the Dockerfile is what the package does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from headrace.worker.cli import COMMANDS
from headrace.worker.command import known_variables
from headrace.worker.exit_codes import ExitCode
from headrace.worker.flags import flags_of, load_settings
from headrace.worker.settings import WorkerFlags
from headrace.worker.settings_client import HealthFlags
from headrace.worker.units import parse_duration_s
from scripts.write_operations_tables import PAGE, render

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "worker": {flag.option for flag in flags_of(WorkerFlags)},
    "health": {flag.option for flag in flags_of(HealthFlags)},
}


def compose() -> dict[str, Any]:
    """The compose file, taken apart."""
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


def default_of(value: object) -> str:
    """`${NAME:-default}` as compose reads it without NAME."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, continued lines joined."""
    text = "".join(line for line in (ROOT / "Dockerfile").open() if not line.startswith("#")).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def check_command(words: list[str]) -> None:
    """Every command line of ours names a command and flags that there are."""
    name, *rest = words
    assert name in {entry.name for entry in COMMANDS}
    for word in rest:
        assert not word.startswith("--") or word.partition("=")[0] in OPTIONS[name], word


def test_the_page_says_what_the_code_says() -> None:
    page = PAGE.read_text()
    assert page == render(page), "run: python scripts/write_operations_tables.py"
    for code in ExitCode:
        assert f"| {code.value} | {code.name} | {code.meaning} |" in page
    for flag in flags_of(WorkerFlags):
        assert f"`{flag.variable}`" in page


def test_compose_sets_up_the_server_as_the_worker_needs_it() -> None:
    server = compose()["services"]["redis"]
    command = server["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--appendonly"] == "yes"
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    assert server["volumes"] == ["redis-data:/data"]
    assert "ping" in server["healthcheck"]["test"]


def test_compose_runs_a_worker_that_the_package_has() -> None:
    worker = compose()["services"]["worker"]
    check_command(worker["command"])
    variables = {name: default_of(value) for name, value in worker["environment"].items()}
    assert set(variables) <= known_variables()
    by_variable = {flag.variable: flag.field for flag in flags_of(WorkerFlags)}
    given = {by_variable[name]: value or None for name, value in variables.items()}  # set to nothing is not set
    settings = load_settings(WorkerFlags, given)
    assert settings.model == "demo"
    assert settings.device == "cpu"
    assert settings.url().startswith("redis://redis:")  # the service's name
    assert worker["depends_on"]["redis"]["condition"] == "service_healthy"
    assert worker["init"] is True
    grace_s = parse_duration_s(worker["stop_grace_period"])
    assert isinstance(grace_s, float) and grace_s >= settings.drain_timeout + 10


def test_the_health_checks_look_at_consumption() -> None:
    program, *words = compose()["services"]["worker"]["healthcheck"]["test"][1:]
    assert (program, words) == ("headrace", ["health"])
    check_command(words)
    [check] = [arguments for name, arguments in instructions() if name == "HEALTHCHECK"]
    assert json.loads(check.partition("CMD ")[2]) == [program, *words]


def test_the_image_runs_what_the_package_has() -> None:
    by_name = dict(instructions())
    assert json.loads(by_name["ENTRYPOINT"]) == ["headrace"]
    check_command(json.loads(by_name["CMD"]))
    assert by_name["USER"] != "root"
    named = set(
        re.findall(r"HEADRACE_[A-Z_]+", " ".join(arguments for name, arguments in instructions() if name == "ENV"))
    )
    assert named and named <= known_variables()


def test_the_image_takes_its_arguments_from_compose() -> None:
    declared = {arguments.partition("=")[0] for name, arguments in instructions() if name == "ARG"}
    assert set(compose()["services"]["worker"]["build"]["args"]) <= declared
    [index] = [arguments.partition("=")[2] for name, arguments in instructions() if arguments.startswith("TORCH_INDEX")]
    assert default_of(compose()["services"]["worker"]["build"]["args"]["TORCH_INDEX"]) == index


def test_the_image_gets_every_file_that_its_build_needs() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for name, arguments in instructions()
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in allowed), source
    folders = {path.split("/")[0] for path in _package_folders()}
    assert folders <= {source.split("/")[0] for source in copied}
    extra = [arguments for name, arguments in instructions() if name == "RUN" and ".[worker]" in arguments]
    assert extra


def _package_folders() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["setuptools"]["package-dir"].values())


def test_what_lines_say_of_a_model_is_what_the_page_says() -> None:
    """Every phrase of the table stands in a message of the loader, up to the values in it."""
    sources = [*(ROOT / "engine").glob("*.py"), ROOT / "worker" / "model_place.py"]
    text = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sources)
    text = re.sub(r"\{[^{}]*\}", "\N{HORIZONTAL ELLIPSIS}", text)
    rows = PAGE.read_text().partition("## When a model does not load")[2].partition("\n## ")[0]
    phrases = [
        phrase for row in re.findall(r"^\| (`.+?) \|", rows, re.MULTILINE) for phrase in re.findall("`(.+?)`", row)
    ]
    assert len(phrases) > 20
    for phrase in phrases:
        for part in phrase.replace("F32, F16, BF16", "…").split("…"):
            assert part.strip() in text, phrase
