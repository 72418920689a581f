"""A run of a plan, played through without computing anything: how long W workers take, idle and keep jobs waiting.

The rules are those of the queue (jobs.queue): a free worker takes the ready job of the highest priority, the plan's
order within it, but rather a follower of a source that it holds than of another one; a job that waited too long goes
before that, and in a share of the claims before higher priorities. A source that fails hands its followers to their
fallback, or to one of their own. Pure and deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from chorus_batch.jobs.curve import ROUNDING, Domain, FloatArray
from chorus_batch.jobs.errors import ChorusBatchError
from chorus_batch.jobs.nearest import IntArray

FAIR_TURN = 8  # of so many claims one looks at the lowest priority first; the queue draws lots for it
HELD = 8  # sources whose latents a worker keeps in memory, about: what it really keeps is bounded in bytes


class SimulationError(ChorusBatchError):
    """Jobs that can't be played: they wait for each other, or nobody is left to run them."""

    code = "simulation"


@dataclass(frozen=True)
class PlannedJob:
    """One row of a plan. Costs and times in one unit of the caller's choice: seconds, or plain generations.

    `source` and `fallback` are indices into the sequence of jobs. `full` is what the job costs where neither gave it
    anything to start from; None: as much as `cost`. `similarity` (to the source) chooses who takes a failed source's
    place.
    """

    cost: float
    position: int
    source: int | None = None
    fallback: int | None = None
    priority: int = 0
    arrival: float = 0.0
    full: float | None = None
    similarity: float = 0.0
    duplicate: bool = False  # linked to its source's result, whatever became of the latents


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in a run; jobs and workers by index."""

    failing: Collection[int] = ()  # jobs that fail at their end, for good
    slower: Mapping[int, float] = field(default_factory=dict)  # jobs that take so many times as long: stragglers
    deaths: Sequence[tuple[float, int]] = ()  # (when, worker): what it runs is lost
    lease: float = 0.0  # how long after a death the job is back in the queue


@dataclass(frozen=True)
class Makespan:
    """What a run came to, in the unit of the jobs' costs. `lower_bound`: of the plan, without any trouble."""

    length: float
    lower_bound: float
    work: float  # of all attempts, lost ones included
    idle: float  # of all living workers, until the last job ended
    longest_wait: float  # of a job that was ready
    mean_wait: float
    finished: int
    failed: int
    near: int  # followers that were run where their source was held
    live_sources: int  # at most so many finished sources had followers to come
    unserved: int  # followers that found no source to start from
    ends: tuple[float, ...] = field(repr=False)  # of each job
    starts: tuple[float, ...] = field(repr=False)

    @property
    def ratio(self) -> float:
        """Length over the lower bound: 1 is perfect."""
        return self.length / self.lower_bound if self.lower_bound else 1.0


def simulate(
    jobs: Sequence[PlannedJob],
    workers: int,
    *,
    max_wait: float = math.inf,
    held: int = HELD,
    trouble: Trouble | None = None,
    sticky: bool = True,
) -> Makespan:
    """Play `jobs` through with `workers` (1 or more). O(n log n).

    `max_wait`: a job ready for longer goes before what a worker holds. Without `sticky` workers have no preference for
    what they hold. Raises SimulationError for jobs that wait for each other, and if all workers die.
    """
    if workers < 1:
        raise SimulationError(f"{workers} workers can't run anything")
    return _Run(jobs, workers, max_wait, held if sticky else 0, trouble or Trouble()).played()


def lower_bound(jobs: Sequence[PlannedJob], workers: int) -> float:
    """No order of work is over sooner: what the work and the plan's chains of source and follower allow at best.

    The larger of the longest chain (arrival, source, follower) and of all work shared evenly, with those workers idle
    that have nothing to do until the first source ends.
    """
    ends: list[float | None] = [None] * len(jobs)
    for first in range(len(jobs)):
        chain = [first]
        while (source := jobs[chain[-1]].source) is not None and ends[source] is None:
            chain.append(source)
            if len(chain) > len(jobs):
                raise SimulationError(f"job {first} waits for itself")
        for job in reversed(chain):
            source = jobs[job].source
            before = (ends[source] or 0.0) if source is not None else 0.0
            ends[job] = max(jobs[job].arrival, before) + jobs[job].cost
    chains = max((end or 0.0 for end in ends), default=0.0)
    heads = [job for job in jobs if job.source is None]
    first_end = min((job.arrival + job.cost for job in heads), default=0.0)
    waiting = max(0, workers - len(heads)) * first_end if len(heads) < len(jobs) else 0.0
    return max((math.fsum(job.cost for job in jobs) + waiting) / workers, chains)


_ARRIVAL, _END, _DEATH, _RETURN = range(4)  # events, in the order in which those of one moment happen


class _Run:
    """The state of one run. Indices into `jobs` throughout."""

    def __init__(self, jobs: Sequence[PlannedJob], workers: int, max_wait: float, held: int, trouble: Trouble) -> None:
        self.jobs, self.max_wait, self.trouble = jobs, max_wait, trouble
        self.bound = lower_bound(jobs, workers)
        self.source = [job.source for job in jobs]  # as re-pointed
        self.served = [True] * len(jobs)  # whether there is something to start from
        self.waiting: dict[int, list[int]] = {}
        self.state = ["waiting"] * len(jobs)
        # Heaps of (-priority, position, job), with jobs that were taken meanwhile: by -priority, and by source.
        self.ready: dict[int, list[tuple[int, int, int]]] = {-job.priority: [] for job in jobs}
        self.urgent_first, self.urgent_last = sorted(self.ready), sorted(self.ready, reverse=True)
        self.near: dict[int, list[tuple[int, int, int]]] = {}
        self.since = [0.0] * len(jobs)
        self.left: dict[int, int] = {}  # followers to come, by source
        self.holds: list[list[int]] = [[] for _ in range(workers)]
        self.capacity = held
        self.free = list(range(workers))
        self.alive = [True] * workers
        self.running: dict[int, tuple[int, float]] = {}  # worker -> job, when it began
        self.events: list[tuple[float, int, int, int]] = []
        self.starts, self.ends = [math.nan] * len(jobs), [math.nan] * len(jobs)
        self.waits: list[float] = []
        self.work = 0.0
        self.hits = self.live = self.most_live = 0

    def played(self) -> Makespan:
        for index, job in enumerate(self.jobs):
            if job.source is not None:
                self.left[job.source] = self.left.get(job.source, 0) + 1
            if job.arrival > 0:
                heapq.heappush(self.events, (job.arrival, _ARRIVAL, index, 0))
            else:
                self._arrive(index, 0.0)
        for when, worker in self.trouble.deaths:
            heapq.heappush(self.events, (when, _DEATH, worker, 0))
        self._hand_out(0.0)
        alive_until: list[float] = []
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, kind, subject, worker = heapq.heappop(self.events)
                if kind == _ARRIVAL:
                    self._arrive(subject, now)
                elif kind == _RETURN:
                    self._make_ready(subject, now)
                elif kind == _END:
                    self._end(subject, worker, now)
                elif self.alive[subject]:
                    alive_until.append(now)
                    self._die(subject, now)
            self._hand_out(now)
        unfinished = [index for index, end in enumerate(self.ends) if math.isnan(end)]
        if unfinished:
            raise SimulationError(f"{len(unfinished)} jobs were never run, job {unfinished[0]} the first of them")
        length = max(self.ends, default=0.0)
        lived = length * sum(self.alive) + sum(min(end, length) for end in alive_until)
        failed = self.state.count("failed")
        unserved = self.served.count(False)
        return Makespan(
            length=length,
            lower_bound=self.bound,
            work=self.work,
            idle=max(0.0, lived - self.work),
            longest_wait=max(self.waits, default=0.0),
            mean_wait=math.fsum(self.waits) / len(self.waits) if self.waits else 0.0,
            finished=len(self.jobs) - failed,
            failed=failed,
            near=self.hits,
            live_sources=self.most_live,
            unserved=unserved,
            ends=tuple(self.ends),
            starts=tuple(self.starts),
        )

    def _arrive(self, job: int, now: float) -> None:
        source = self.source[job]
        if source is None or self.state[source] == "done":
            self._make_ready(job, now)
        elif self.state[source] == "failed":
            self._orphaned(source, [job], now)
        else:
            self.waiting.setdefault(source, []).append(job)

    def _make_ready(self, job: int, now: float) -> None:
        self.state[job] = "ready"
        self.since[job] = now
        key = (-self.jobs[job].priority, self.jobs[job].position, job)
        heapq.heappush(self.ready[key[0]], key)
        source = self.source[job]
        if source is not None:
            heapq.heappush(self.near.setdefault(source, []), key)

    def _hand_out(self, now: float) -> None:
        while self.free:
            # The lowest worker first: any would do, but the run must be the same every time.
            taken = self._taken(self.free[0], now)
            if taken is None:
                return
            worker = heapq.heappop(self.free)
            self.state[taken] = "running"
            self.waits.append(now - self.since[taken])
            self.starts[taken] = now
            self.running[worker] = (taken, now)
            job = self.jobs[taken]
            cost = job.cost if self.served[taken] or job.full is None else job.full
            cost *= self.trouble.slower.get(taken, 1.0)
            source = self.source[taken]
            if source is not None:
                self.hits += source in self.holds[worker]
                self._hold(worker, source)
            heapq.heappush(self.events, (now + cost, _END, taken, worker))

    def _taken(self, worker: int, now: float) -> int | None:
        heads = (self._first(self.ready[level]) for level in self.urgent_first)
        head = next((found for found in heads if found is not None), None)
        if head is None:
            return None
        if len(self.urgent_last) > 1 and len(self.waits) % FAIR_TURN == FAIR_TURN - 1:
            lowest = (self._first(self.ready[level]) for level in self.urgent_last)
            last = next((found for found in lowest if found is not None), head)
            if now - self.since[last[2]] > self.max_wait:
                return last[2]
        if self.source[head[2]] is None or now - self.since[head[2]] > self.max_wait:
            return head[2]
        best = min(
            (found for source in self.holds[worker] if (found := self._first(self.near.get(source))) is not None),
            default=None,
        )
        return best[2] if best is not None and best[0] == head[0] else head[2]

    def _first(self, heap: list[tuple[int, int, int]] | None) -> tuple[int, int, int] | None:
        while heap and self.state[heap[0][2]] != "ready":
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _hold(self, worker: int, source: int) -> None:
        holds = self.holds[worker]
        if source in holds:
            holds.remove(source)
        holds.append(source)
        if len(holds) > self.capacity:
            # What nobody waits for any more goes first: it costs the search time and can't be asked for.
            holds.remove(next((s for s in holds if not self.left.get(s)), holds[0]))

    def _end(self, job: int, worker: int, now: float) -> None:
        if self.running.get(worker, (None,))[0] != job:
            return  # the worker died under it
        self.work += now - self.running.pop(worker)[1]
        heapq.heappush(self.free, worker)
        self.ends[job] = now
        source = self.jobs[job].source
        if source is not None:
            self.left[source] -= 1
            self.live -= not self.left[source] and self.state[source] == "done"
        orphans = self.waiting.pop(job, [])
        if job in self.trouble.failing:
            self.state[job] = "failed"
            self._orphaned(job, orphans, now)
            return
        self.state[job] = "done"
        if self.left.get(job):
            self.live += 1
            self.most_live = max(self.most_live, self.live)
        self._hold(worker, job)
        for follower in orphans:
            self._make_ready(follower, now)

    def _orphaned(self, source: int, orphans: list[int], now: float) -> None:
        """To the fallback if it is done or to come; else one of them takes the source's place; only once, though."""
        left: list[int] = []
        for job in orphans:
            fallback = self.jobs[job].fallback
            if fallback is None or fallback == source or self.state[fallback] == "failed":
                left.append(job)
            elif self.state[fallback] == "done":
                self.source[job] = fallback
                self._make_ready(job, now)
            else:
                self.source[job] = fallback
                self.waiting.setdefault(fallback, []).append(job)
        planned = [job for job in left if self.jobs[job].source == source]
        heir = max(planned, key=lambda job: (self.jobs[job].similarity, -self.jobs[job].position), default=None)
        for job in left:
            if job == heir or heir is None or job not in planned:
                self.served[job] = False
                self._make_ready(job, now)
            else:
                self.source[job] = heir
                self.waiting.setdefault(heir, []).append(job)

    def _die(self, worker: int, now: float) -> None:
        self.alive[worker] = False
        if worker in self.free:
            self.free.remove(worker)
            heapq.heapify(self.free)
        if worker in self.running:
            job, began = self.running.pop(worker)
            self.work += now - began
            heapq.heappush(self.events, (now + self.trouble.lease, _RETURN, job, 0))
        self.holds[worker] = []


def simulate_online(
    vectors: FloatArray, order: IntArray, domain: Domain, workers: int
) -> tuple[Makespan, list[PlannedJob]]:
    """A run without any plan, as a serving system has it, and what each row cost in it.

    Rows [n, d] (unit vectors) are taken in `order`; each follows the nearest row that was computed in full and is done,
    if it is as similar as `domain` asks for, else it is computed in full itself: rows that run side by side miss each
    other. O(n^2 d).
    """
    jobs: list[PlannedJob | None] = [None] * len(order)
    done = np.empty_like(vectors)
    sources: list[int] = []
    running: list[tuple[float, int, int, bool]] = []
    starts, ends, waits = [0.0] * len(order), [0.0] * len(order), []
    free = list(range(workers))
    now, place = 0.0, 0
    while place < len(order) or running:
        while free and place < len(order):
            row = int(order[place])
            near = done[: len(sources)] @ vectors[row]
            best = int(np.argmax(near)) if sources else -1
            hit = best >= 0 and float(near[best]) >= domain.tau - ROUNDING
            cost = float(domain.curve(near[best : best + 1])[0]) if hit else 1.0
            jobs[row] = PlannedJob(cost, place, similarity=float(near[best]) if hit else 0.0)
            starts[row], ends[row] = now, now + cost
            waits.append(now)
            heapq.heappush(running, (ends[row], heapq.heappop(free), row, hit))
            place += 1
        now, worker, row, hit = heapq.heappop(running)
        heapq.heappush(free, worker)
        if not hit:
            done[len(sources)] = vectors[row]
            sources.append(row)
    made = [job for job in jobs if job is not None]
    work = math.fsum(job.cost for job in made)
    run = Makespan(
        length=now,
        lower_bound=lower_bound(made, workers),
        work=work,
        idle=max(0.0, now * workers - work),
        longest_wait=max(waits, default=0.0),
        mean_wait=math.fsum(waits) / len(waits) if waits else 0.0,
        finished=len(made),
        failed=0,
        near=0,
        live_sources=len(sources),
        unserved=0,
        ends=tuple(ends),
        starts=tuple(starts),
    )
    return run, made


def in_order(jobs: Sequence[PlannedJob], order: Sequence[int]) -> list[PlannedJob]:
    """The same jobs handed out in another order: `order` lists their indices, first to last."""
    place = {job: position for position, job in enumerate(order)}
    return [replace(job, position=place[index]) for index, job in enumerate(jobs)]
