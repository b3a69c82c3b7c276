"""The worker's hash: what it is and does, for `status` and for those who scale. Written with each renewal."""

from __future__ import annotations

import os
import socket
import time

from . import lua
from .context import Context
from .drain import Drain
from .lua import Args


class Heartbeat:
    """Makes the command that writes the hash. Called on the lease thread: knows the engine by the loop's snapshots."""

    def __init__(self, context: Context, drain: Drain) -> None:
        self._context = context
        self._drain = drain
        self._last_tokens = 0
        self._last_s = time.monotonic()

    def command(self, stalled: bool) -> Args:
        """The command, with what is true now; `stalled`: the step loop makes no progress."""
        context = self._context
        now_s, tokens = time.monotonic(), context.counters.tokens
        rate = (tokens - self._last_tokens) / max(now_s - self._last_s, 1e-3)
        self._last_s, self._last_tokens = now_s, tokens
        stats = context.stats
        fields: dict[str, str | int] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "model": context.model.name,
            "fingerprint": context.model.fingerprint,
            "lease_s": f"{context.settings.lease_s:g}",
            "state": "stuck" if stalled else "draining" if self._drain.is_on else "running",
            "running": stats.running,
            "waiting": stats.waiting,
            "held": len(context.memory),
            "free_kv_blocks": stats.free_blocks,
            "total_kv_blocks": stats.total_blocks,
            "step": stats.step,
            "tokens_per_s": f"{rate:.1f}",
            **context.counters.snapshot(),
        }
        ttl_ms = max(1, int(3 * context.settings.renew_every_s * 1000))
        pairs = [part for pair in fields.items() for part in pair]
        return lua.call(lua.HEARTBEAT, (context.keys.worker(context.worker),), (ttl_ms, *pairs))
