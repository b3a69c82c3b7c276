"""`headrace demo`: an embedded server, a worker as a process of its own, and requests that stream side by side."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import redis

from ..clients.aio import AsyncClient
from ..clients.errors import HeadraceError
from ..clients.keys import Keys
from .child import end_child, start_child
from .demo_prompts import demo_prompts
from .demo_totals import Track, totals
from .demo_view import View, make_view
from .embedded import EmbeddedServer, ServerOptions
from .exit_codes import CommandError, ExitCode
from .extra import require_extra
from .settings import DemoFlags
from .status import read_status

QUEUE = "demo"
START_LIMIT_S = 120.0  # a first start compiles the kernel, a slow disk reads torch for a while
RUN_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
_POLL_S = 0.05
_WHAT_NEXT = (
    "to go on: headrace worker --model demo --embedded --port 6379, and beside it: headrace submit --chat 'Hello!'"
)
_HEARTBEAT_WAIT_S = 3.0


class WorkerProcess:
    """The very command `headrace worker`, as a child that ends with us."""

    def __init__(self, url: str, settings: DemoFlags, folder: Path) -> None:
        self._log = folder / "worker.log"
        self._client = redis.Redis.from_url(url)  # pyright: ignore[reportUnknownMemberType]
        self._keys = Keys(queue=QUEUE)
        command = [sys.executable, "-c", "from headrace.worker.cli import main; main()", "worker"]
        command += ["--model", settings.model, "--queue", QUEUE, "--max-num-seqs", str(settings.max_num_seqs)]
        command += ["--lease", "3s", "--drain-timeout", "5s"]
        command += [] if settings.revision is None else ["--revision", settings.revision]
        with self._log.open("wb") as log:
            # The address goes by variable, as it would with a password in it.
            self._process = start_child(command, log, variables={"HEADRACE_REDIS_URL": url})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._client.close()

    def wait_until_ready(self) -> None:
        """Wait for its first sign of life. Raises CommandError if it ends before, or takes too long."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self.fields():
            self.check()
            if time.monotonic() > deadline:
                raise CommandError(f"the worker was not ready within {START_LIMIT_S:g} s", ExitCode.DEMO_FAILED)
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises CommandError, with the worker's last line and its exit code, if it has ended."""
        code = self._process.poll()
        if code is not None:
            known = ExitCode(code) if code in set(ExitCode) and code else ExitCode.DEMO_FAILED
            raise CommandError(f"the worker ended with {code}: {self.last_line()}", known)

    def last_line(self) -> str:
        """The last line that it has written."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("headrace worker: ") if lines else ""

    def doing(self) -> str:
        """What its last line of log says, in a few words."""
        line = self.last_line()
        _, _, event = line.partition("event=")
        return event.split('"')[1] if event.startswith('"') else event.split(" ")[0] or "loading the model"

    def fields(self) -> Mapping[str, str]:
        """What the worker says of itself; empty before its first sign of life."""
        workers = read_status(self._client, self._keys).workers
        return next((each.fields for each in workers if each.fields), dict[str, str]())

    def stop(self) -> int:
        """Let it drain; give its exit code."""
        return end_child(self._process, STOP_LIMIT_S)


def run_demo(settings: DemoFlags) -> ExitCode:
    """Run the demo to its end; OK only if every request ended as it should. Raises CommandError."""
    require_extra()
    tracks = [Track(prompt) for prompt in demo_prompts(settings.prompt)]
    view = make_view(len(tracks))
    with (
        TemporaryDirectory(prefix="headrace-demo-") as folder,
        EmbeddedServer(ServerOptions(binary=settings.server)) as server,
        WorkerProcess(server.url, settings, Path(folder)) as worker,
    ):
        begun_s = time.monotonic()
        with view.starting(worker.doing):
            worker.wait_until_ready()
        view.say(f"the worker was ready after {time.monotonic() - begun_s:.1f} s")
        with view.running(tracks):
            asyncio.run(_ask_all(server.url, tracks, worker, view))
        fields = _settled_fields(worker, sum(track.num_tokens for track in tracks))
        code = worker.stop()
    view.show_totals(totals(tracks, fields))
    problems = [f"{each.prompt.title}: {problem}" for each in tracks if (problem := each.problem)]
    if code:
        problems.append(f"the worker ended with {code}")
    if problems:
        raise CommandError("; ".join(problems), ExitCode.DEMO_FAILED)
    view.say(_WHAT_NEXT)
    return ExitCode.OK


def _settled_fields(worker: WorkerProcess, num_tokens: int) -> Mapping[str, str]:
    """The worker writes its numbers every now and then: wait a moment for those that hold all tokens."""
    deadline = time.monotonic() + _HEARTBEAT_WAIT_S
    while True:
        fields = worker.fields()
        if int(fields.get("tokens", "0")) >= num_tokens or time.monotonic() > deadline or "tokens" not in fields:
            return fields
        time.sleep(_POLL_S)


async def _ask_all(url: str, tracks: Sequence[Track], worker: WorkerProcess, view: View) -> None:
    """Send all requests and follow them to their ends, while the worker lives."""
    async with AsyncClient(url, queue=QUEUE) as client, asyncio.timeout(RUN_LIMIT_S):
        asking = asyncio.gather(*(_ask(client, track, view) for track in tracks))
        while not asking.done():
            worker.check()
            await asyncio.wait([asking], timeout=_POLL_S * 4)
        await asking


async def _ask(client: AsyncClient, track: Track, view: View) -> None:
    """One request from its beginning to its end; what goes wrong is kept in its track."""
    prompt = track.prompt
    await asyncio.sleep(prompt.delay_s)
    track.sent_s = time.monotonic()
    try:
        handle = await client.submit(priority=prompt.priority, **prompt.options)
        to_cancel = prompt.cancel_after
        async with handle.stream(timeout_s=RUN_LIMIT_S, raise_on_error=False) as stream:
            async for event in stream:
                track.take(event, time.monotonic())
                if to_cancel is not None and track.num_tokens >= to_cancel and track.reason is None:
                    to_cancel = None
                    await handle.cancel()
    except HeadraceError as error:
        track.failure = str(error)
    track.ended_s = track.ended_s or time.monotonic()
    view.ended(track)
