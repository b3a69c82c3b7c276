"""Everything at once, at random: workers killed, frozen, cut off and told to stop, while jobs keep coming.

Whatever happens, afterwards every request has ended once, whole, and with the tokens of an undisturbed run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from tests.support.proxy import Proxy
from tests.support.rig import Rig
from tests.support.worker_process import WorkerProcess
from tests.worker.test_end_to_end import expected

LEASE_S = 0.9


class Crew:
    """Three worker processes, each behind a proxy of its own; who falls is replaced."""

    def __init__(
        self, rig: Rig, rng: random.Random, proxy_to: Callable[..., Proxy], start: Callable[..., WorkerProcess]
    ):
        self.rig = rig
        self.rng = rng
        self.proxies = [proxy_to(rig.server) for _ in range(3)]
        self.start = start
        self.workers = [self._start(number) for number in range(3)]

    def _start(self, number: int) -> WorkerProcess:
        url = self.proxies[number].url
        options = {
            "step_time_s": 0.01,
            "lease_s": LEASE_S,
            "max_num_seqs": 4,
            "drain_timeout_s": 0.2,
            "max_attempts": 50,
        }
        return self.start(url, self.rig.prefix, wait=False, **options)

    def trouble(self) -> str:
        """One thing that goes wrong."""
        number = self.rng.randrange(3)
        worker, proxy = self.workers[number], self.proxies[number]
        what = self.rng.choice(["kill", "freeze", "cut", "refuse", "stop", "lose", "delay"])
        if what == "kill":
            worker.kill()
            self.workers[number] = self._start(number)
        elif what == "stop":
            worker.stop()
            self.workers[number] = self._start(number)
        elif what == "freeze":
            worker.freeze()
            time.sleep(self.rng.uniform(0.0, 1.5 * LEASE_S))
            worker.thaw()
        elif what == "cut":
            proxy.cut()
        elif what == "refuse":
            proxy.refuse()
            time.sleep(self.rng.uniform(0.0, 1.2 * LEASE_S))
            proxy.accept()
        elif what == "lose":
            proxy.lose_reply(b"EVALSHA")
        else:
            proxy.delay_s = self.rng.choice([0.0, 0.0, 0.02])
        return what


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_chaos(proxy_to: Callable[..., Proxy], start_worker: Callable[..., WorkerProcess], rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    crew = Crew(rig, rng, proxy_to, start_worker)
    jobs: dict[str, dict[str, object]] = {}
    troubles: list[str] = []
    end_s = time.monotonic() + 6
    while time.monotonic() < end_s:
        for _ in range(rng.randrange(4)):
            name = f"my-{len(jobs)}"
            jobs[name] = {"prompt": f"Hello {name}", "max_tokens": rng.randrange(5, 40), "seed": len(jobs)}
            rig.add(name, jobs[name], priority=rng.choice(["high", "normal", "low"]))
            if rng.random() < 0.1:
                rig.add(name, jobs[name])
        troubles.append(crew.trouble())
        time.sleep(rng.uniform(0.0, 0.2))
    for number, proxy in enumerate(crew.proxies):
        proxy.accept()
        proxy.delay_s = 0.0
        if crew.workers[number].process.poll() is not None:
            crew.workers[number] = crew._start(number)
    rig.wait_done(*jobs, timeout_s=25)
    rig.wait_empty()
    for name, job in jobs.items():
        assert rig.told(name)[0].token_ids == expected(job), (name, troubles)
    assert rig.dead() == []
