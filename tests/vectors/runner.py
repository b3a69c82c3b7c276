"""Runs one vector: puts what it gives on a server, lets a worker of the scripted model at it, and looks what is there.

A vector is a JSON file: `given` (a job's entry, and what lies on the server before), `settings`, and `expected` (what
lies there afterwards, payloads byte for byte). What differs from run to run is replaced before comparing:

    A-0, A-1, …     ids of the attempt that the worker begins (its A is the server's clock)
    WORKER          the worker's name
    timing          each time is 0.0
    usage.cached    as it is; the scripted model's prefix cache is empty at the start

`python -m tests.vectors.runner --write FILE…` writes `expected` anew from what happens: read the difference before you
keep it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import redis

from headrace.clients.keys import Keys
from headrace.clients.payload import Kind, pack, unpack
from headrace.engine.types import EngineConfig, ModelInfo
from headrace.worker.options import WorkerSettings
from tests.support.rig import ThreadWorker
from tests.support.scripted import ByteTokenizer, ScriptedRunner
from tests.support.server import Server, start_server
from tests.support.worker_process import wait_until

PREFIX = "vector"
FOLDER = Path(__file__).resolve().parent
# The jobs' ids are fixed, and old by now: a queue whose requests live for a century takes them all the same.
CENTURY_S = 3_153_600_000.0


def load(path: Path) -> dict[str, Any]:
    """A vector."""
    vector: dict[str, Any] = json.loads(path.read_text())
    return vector


def all_vectors() -> list[Path]:
    """All files, by name."""
    return sorted(FOLDER.glob("*.json"))


def run_vector(vector: dict[str, Any], server: Server) -> dict[str, Any]:
    """What lies on the server when the worker has nothing left to do."""
    keys = Keys(PREFIX, "default")
    client = server.client()
    client.flushall()
    given = vector["given"]
    _put(client, keys, given)
    worker = _worker(vector, server)
    try:
        if given.get("handed_back"):
            wait_until(lambda: worker.counters.handed_back == 1)
        else:
            wait_until(lambda: _is_over(client, keys, given), what=vector["rule"])
    finally:
        worker.stop(2)
    found = _look(client, keys, given, worker.name)
    client.close()
    return found


def _put(client: redis.Redis, keys: Keys, given: dict[str, Any]) -> None:
    for entry in given.get("stream", []):
        client.xadd(keys.out(given["id"]), _fields(entry), id=entry["id"])
    if given.get("stream"):
        client.expire(keys.out(given["id"]), 86_400)
    if given.get("cancel"):
        client.set(keys.cancel(given["id"]), "1", ex=86_400)
    for number, job in enumerate(given["jobs"]):
        stream = keys.jobs(job.get("priority", "normal"))
        client.xadd(stream, {name: _bytes(value) for name, value in job["fields"].items()}, id=job["entry_id"])
        if number == 0:
            for each in keys.all_jobs:
                client.xgroup_create(each, "workers", "0", mkstream=True)
        if "pending_for" in job:
            client.xgroup_setid(stream, "workers", job["entry_id"])
            idle = 0 if job.get("alive") else 10**9
            client.xclaim(
                stream, "workers", job["pending_for"], 0, [job["entry_id"]], idle=idle, force=True, justid=True
            )


def _worker(vector: dict[str, Any], server: Server) -> ThreadWorker:
    settings = {"queue_ttl_s": CENTURY_S, "foreign_model_grace_s": CENTURY_S, **vector.get("settings", {})}
    runner = ScriptedRunner(script="echo", **{"num_blocks": 64, "max_model_len": 128, **vector.get("model", {})})
    return ThreadWorker(
        WorkerSettings(url=server.url, prefix=PREFIX, **settings),
        runner,
        EngineConfig(max_num_seqs=4),
        ModelInfo("scripted", "f" * 64),
        ByteTokenizer(),
    )


def _is_over(client: redis.Redis, keys: Keys, given: dict[str, Any]) -> bool:
    alive = sum(bool(job.get("alive")) for job in given["jobs"])
    return sum(client.xlen(stream) for stream in keys.all_jobs) <= alive


def _look(client: redis.Redis, keys: Keys, given: dict[str, Any], worker: str) -> dict[str, Any]:
    out = keys.out(given["id"])
    old = {entry["id"] for entry in given.get("stream", [])}
    pending = {
        entry["message_id"].decode(): entry["consumer"].decode()
        for stream in keys.all_jobs
        for entry in client.xpending_range(stream, "workers", "-", "+", 100)
    }
    return {
        "stream": [_entry(entry_id.decode(), fields, old, worker) for entry_id, fields in client.xrange(out)],
        "dead": [
            {name.decode(): _text(value).replace(worker, "WORKER") for name, value in fields.items()}
            for _, fields in client.xrange(keys.dead)
        ],
        "jobs": [entry_id.decode() for stream in keys.all_jobs for entry_id, _ in client.xrange(stream)],
        "pending": pending,
        "cancel": bool(client.exists(keys.cancel(given["id"]))),
        "lives_s": None if not client.exists(out) else round(client.pttl(out) / 1000, -1),
    }


def _entry(entry_id: str, fields: dict[bytes, bytes], old: set[str], worker: str) -> dict[str, str]:
    [(name, payload)] = fields.items()
    if entry_id in old:
        return {"id": entry_id, name.decode(): _text(payload)}
    kind: Kind = "json" if name == b"json" else "d"
    event = unpack(payload, kind)
    if pack(event, kind) != payload:
        raise AssertionError(f"{entry_id}: not the shortest encoding of its map")
    if event.get("worker") == worker:
        event["worker"] = "WORKER"
    if "timing" in event:
        event["timing"] = dict.fromkeys(event["timing"], 0.0)
    return {"id": f"A-{entry_id.partition('-')[2]}", name.decode(): _text(pack(event, kind))}


def _fields(entry: dict[str, Any]) -> dict[str, bytes]:
    return {name: _bytes(value) for name, value in entry.items() if name != "id"}


def _bytes(value: Any) -> bytes:
    """A payload as the file has it: text as it is, a map as compact JSON, `hex:…` for bytes."""
    if isinstance(value, dict):
        return pack(value, "json")
    return bytes.fromhex(value[4:]) if value.startswith("hex:") else value.encode()


def _text(value: bytes) -> str:
    try:
        return value.decode() if value.isascii() or not value[:1] > b"\x7f" else f"hex:{value.hex()}"
    except UnicodeDecodeError:
        return f"hex:{value.hex()}"


def main() -> None:
    """Write `expected` of the files named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", nargs="*", type=Path, default=[])
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder))
        for path in parser.parse_args().write or all_vectors():
            vector = load(path)
            vector["expected"] = run_vector(vector, server)
            path.write_text(json.dumps(vector, ensure_ascii=False, indent=1) + "\n")
        server.stop()


if __name__ == "__main__":
    main()
