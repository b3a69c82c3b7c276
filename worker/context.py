"""What the parts of one worker share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..clients.events import JobRef
from ..clients.keys import Keys
from ..engine.types import EngineStats, ModelInfo
from .attempt import Rules
from .clock import ServerClock
from .held import Memory
from .lease import Leases
from .log import Counters, Log
from .options import WorkerSettings
from .rights import Alarms


@dataclass(slots=True)
class Context:
    """Handed to every part at its making; all but `leases` and `clock` belong to the step loop's thread alone."""

    settings: WorkerSettings
    keys: Keys
    worker: str  # its name: of its consumer, its hash and in `started`
    model: ModelInfo
    log: Log
    alarms: Alarms
    counters: Counters
    clock: ServerClock
    leases: Leases
    memory: Memory
    stats: EngineStats  # of a moment ago
    reconcile: bool = False  # the own pending list is to be compared with memory
    _left: dict[JobRef, float] = field(default_factory=dict[JobRef, float])

    @property
    def rules(self) -> Rules:
        """The settings that decisions depend on."""
        settings = self.settings
        return Rules(settings.max_attempts, int(settings.foreign_model_grace_s * 1000), settings.too_old_after_ms)

    def leave_alone(self, ref: JobRef, for_s: float) -> None:
        """Do not take this entry again for a while: others may do better with it."""
        now_s = time.monotonic()
        self._left = {each: until_s for each, until_s in self._left.items() if until_s > now_s}
        self._left[ref] = now_s + for_s

    def is_left(self, ref: JobRef) -> bool:
        """Whether this entry is to be left alone at present."""
        return self._left.get(ref, 0.0) > time.monotonic()
