"""What must be said before any test module imports torch."""

from __future__ import annotations

from headrace.engine.threads import sleep_when_idle

sleep_when_idle()
