"""From the first training call to a settled plan: survive, profile, plan, compare, settle, and watch.

Every rank goes through the same states, since all count the same calls and decide by what they gather from each other;
rank 0 plans. A call is one training step's forwards and backwards on Megatron's schedule; evaluation is none.

    call 1       survive: the optimizer makes its states after it. A plan kept for the same job is used from here on.
    calls 2-4    profile (`Profiler`)
    then         plan; each plan runs three calls, of which the first is not measured, until one is settled on
                 (another number of micro-batches is no reason to plan again unless more is held at once)
    settled      every tenth call the ranks ask each other whether activations had to be evicted, or allocators had to
                 retry in each call; if so, plan again (not where no plan fits: what that evicts has been told)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mem import progress, reserve
from mindspeed_mem.activation.observe import profiler
from mindspeed_mem.activation.observe.profiler import Profiler
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.adaptive.problem import from_profile, profile_file
from mindspeed_mem.adaptive.problem.definition import Pipeline
from mindspeed_mem.adaptive.problem.profile_file import Facts
from mindspeed_mem.adaptive.run import kept_plan
from mindspeed_mem.adaptive.run.call_meter import CallMeter
from mindspeed_mem.adaptive.run.planner import Decision, Planner
from mindspeed_mem.adaptive.run.training_call import Call, Sizes
from mindspeed_mem.adaptive.search import plan_file
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.device.link_speed import measure_link
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError

if TYPE_CHECKING:
    from mindspeed_mem.activation.engine import Engine

logger = logging.getLogger(__name__)

SURVIVE, PROFILE, TRY, SETTLED, OFF = "survive", "profile", "try", "settled", "off"
_CALLS_EACH = 3  # of a plan that is tried
_WATCHED = 10
_UNSEEN = 10  # calls without a backward that are profiled in vain before nothing is planned
_NO_BACKWARD = (
    f"{_UNSEEN} training steps were profiled in which no backward of the model was seen; a step has to run forward, "
    "backward and only then the optimizer's step, the loss has to come from what the model returns, and the model may "
    "not run as a whole under a checkpoint"
)
_EXPLAINED = (from_profile.UnplannableError, InfeasibleError, MemoryConfigError)  # by what they say; others are faults
_AGAIN = 3  # times to plan again after evictions, or to profile other shapes, before it is left to eviction
_MORE = 2  # times to profile again where a layer did not run in each step
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "data": "data_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "distributed_optimizer": "states_are_split",
    "chunk_zero_stage": "chunk_zero_stage",
}
"""What a profile calls facts of a job that other layouts are estimated from."""


class _Settled(NamedTuple):
    """What a plan that was settled on rests on, to go back to."""

    config: MemoryConfig | None
    planner: Planner | None
    profiles: list[Any]
    profiled: bool
    fits: bool
    """Where none does, what has to be evicted is no news."""


class Ranks(NamedTuple):
    """This rank among the others."""

    rank: int
    stage: int
    gather: Callable[[Any], list[Any]]
    """Collects an object from all ranks, on all of them."""
    to_first: Callable[[Any], list[Any]]
    """The same on rank 0 only."""
    partners: Collection[int]
    """The ranks with which this one runs collectives inside layers."""


class Adaptation:
    """Of one engine, which survives. ``target``: where the plan that is settled on is kept; None: nowhere."""

    # of the training call that runs
    _ranks: Ranks
    _call: Call

    def __init__(self, engine: Engine, target: Path | None = None):
        assert engine.survival is not None
        engine.survival.advises_recompute, engine.adaptation = False, self
        self.engine, self.target = engine, target
        self.state = SURVIVE
        self.planner: Planner | None = None  # on rank 0
        self.profiles: list[Any] = []  # on rank 0
        self.profiled = False
        self._sizes = Sizes()
        self._begun = self._follows = False  # any call; the one that runs is profiled, measured or watched
        self._facts: Facts = {}
        self._calls = 0  # in this state
        self._profiler: Profiler | None = None
        self._shown = contextlib.ExitStack()  # on a terminal, while a call is profiled
        self._meter = CallMeter(engine)
        self._evicted = self._overruns = self._reshaped = self._incomplete = 0
        self._retries = self._retried = 0  # of the allocator when a call began; calls of a settled plan that had any
        self.has_settled = False
        """On any plan so far."""
        self._config: MemoryConfig | None = None  # in force
        self._settled: dict[Call, _Settled] = {}

    # ---- a training call
    def begin(self, call: Call, ranks: Ranks, facts: Callable[[], Facts], ran: Call | None = None) -> None:
        """A training call begins on every rank.

        Args:
            call: what it is; where nobody knows that yet, the largest that is expected.
            facts: tells what a kept plan must have been made for.
            ran: what the call before was, on any rank, where that was not known.
        """
        self._call, self._ranks = call, ranks
        if ran is not None:
            self._has_run(ran)
        if not self._begun:
            self._begun = True
            self._start(facts)
        elif self.state == SURVIVE:
            self._facts = facts()  # of this one
        elif self.state != OFF:
            if ran is None:
                self._sizes.begins(call)
            self._follow_sizes(facts)
        if self._is_of_the_size():
            states = {SURVIVE: self._survive, PROFILE: self._profile, TRY: self._try, SETTLED: self._watch}
            states.get(self.state, lambda: None)()
        self._follows = self._is_of_the_size()  # or not any more
        if not self._follows:
            if self.state == PROFILE:
                self._attached().skips_call()
            return
        self._calls += 1
        if self.state == PROFILE:
            what = f"profiling training step {min(self._calls, profiler.CALLS)} of {profiler.CALLS} for a memory plan"
            self._shown.enter_context(self._telling(what, "slower than others"))
            self._attached().begin_call()
        elif self.state == TRY:
            self._meter.begin()
        self._retries = self.engine.backend.allocation_retries()

    def _has_run(self, ran: Call) -> None:
        """The call before was this one. If it was none to be measured, what it brought is forgotten."""
        self._sizes.runs(ran)
        of_the_size = self._is_of_the_size()
        self._sizes.runs(None)  # of the one that begins nobody knows
        if of_the_size or not self._follows:
            return
        if self.state == PROFILE:
            self._attached().forget_last()
        elif self._calls > 1:  # the first is not measured anyway
            self._meter.forget_last()
        else:
            return
        self._calls -= 1

    def begin_again(self) -> None:
        """The call that runs found no memory, and is run once more from its beginning, perhaps on this rank alone."""
        if not self._follows:
            return
        if self.state == PROFILE:
            self._attached().begin_again()
        elif self.state == TRY:
            self._meter.begin_again()

    def end(self, completed: bool, micro_batches: int | None = None) -> None:
        """It has ended; not ``completed``: by an exception. ``micro_batches``: how many it had, if not as many as were
        said when it began."""
        self._shown.close()
        if not self._follows:
            return
        if self.state == PROFILE:
            self._attached().end_call(completed)
        elif self.state == TRY and completed and self._calls > 1:
            self._meter.end(self._ranks.stage, micro_batches or self._call.micro_batches)
        elif self.state == SETTLED:
            self._retried += self.engine.backend.allocation_retries() > self._retries
        self._follows = completed

    @property
    def is_over(self) -> bool:
        """Nothing is planned any more. All ranks came to that together, so nobody has to tell of calls from now on."""
        return self.state == OFF

    def report(self) -> tuple[tuple[str, ...], str]:
        """For the end of the run."""
        lines = [] if self.planner is None else self.planner.report()
        if self.planner is None and self.state == SETTLED and self._ranks.rank == 0:
            lines = [f"adaptive memory plan: taken from {self.target}"]
        return tuple(lines), "a plan was settled on" if self.has_settled else ""

    # ---- states
    def _start(self, facts: Callable[[], Facts]) -> None:
        if not self.engine.in_force.num_layers:
            self._stop("no layer is known")
            return
        if None in self._ranks.gather(self.engine.backend.limit()):
            self._stop(f"this device does not say how much memory it has: give {self.engine.wording.device_memory}")
            return
        self._facts = facts()
        found = None
        if self._ranks.rank == 0 and self.target is not None:
            found, why = kept_plan.read(self.target, self._facts)
            if why:
                self._say(why, logging.INFO)
            if found is None and (reason := kept_plan.why_not(self.target)):
                self._say(f"no plan will be kept in {self.target}: {reason}; name another file")
                self.target = None
        config = self._ranks.gather(found)[0]
        if config is not None and self._adopt(config):
            self._settle()

    def _is_of_the_size(self) -> bool:
        """Whether what is profiled or tried is for calls like the one that runs; all others are no part of that."""
        return self.state not in (PROFILE, TRY) or self._sizes.is_measured

    def _survive(self) -> None:
        if self._calls:
            self._aim()
            self._go(PROFILE)
            self._profiler = Profiler(self.engine)
            self._say(f"the next {profiler.CALLS} training steps are profiled", logging.INFO)

    def _profile(self) -> None:
        attached = self._attached()
        everyone = self._ranks.gather((attached.done, attached.unseen))
        if not all(done for done, _ in everyone):
            if max(unseen for _, unseen in everyone) >= _UNSEEN:
                attached.detach()
                self._stop(_NO_BACKWARD)
            return
        mine, error = None, ""
        try:
            with self._telling("measuring copies to the host", "a moment"):
                link = measure_link(self.engine.backend)
            mine = attached.rank_profile(self._ranks.stage, link)
        except Exception as failed:  # whatever it is, the others wait for this rank
            logger.exception("profiling failed")
            error = repr(failed)
        attached.detach()
        errors = [one for one in self._ranks.gather(error) if one]
        if errors:
            self._stop(f"profiling failed: {errors[0]}")
            return
        self.profiles, self.profiled = self._ranks.to_first(mine), True
        self._plan()

    def _plan(self) -> None:
        limit, call = min(self._ranks.gather(self._limit())), self._aim()
        line = Pipeline(
            micro_batches=call.micro_batches,
            group_size=None if call.schedule == "v" else call.group_size,
            cap=call.cap,
            schedule=call.schedule,
            split_backward=call.split_backward,
        )

        def start() -> Decision:
            problem = from_profile.problem(self.profiles, line, limit, self.engine.mover.slabs.limit_bytes)
            self.planner = Planner(problem, bool(self._facts["states_are_split"]), self.engine.wording)
            return self.planner.start()

        self._go(TRY)
        try:
            self._follow(start)
        except BaseException:  # Ctrl-C: whoever goes on all the same gets there again
            self._go(PROFILE)
            raise

    def _try(self) -> None:
        if self._calls == 1 and self.engine.survival is not None:
            self.engine.survival.forget_lacks()  # those of its first call were of memory that another plan had left
        if self._calls < _CALLS_EACH:
            return
        everyone = self._ranks.gather(self._meter.measured())
        seen = [one for one in everyone if one is not None]
        self._go(TRY)
        if len(seen) == len(everyone):  # else a call failed somewhere and was caught: measure again
            self._follow(lambda: self._planner().judge(seen))

    def _watch(self) -> None:
        settled = self._settled.get(self._aim())
        if self._calls % _WATCHED or not self._calls or (settled is not None and not settled.fits):
            return
        grown = self.engine.mover.evicted_bytes - self._evicted
        in_each_call = self._retried // _WATCHED
        self._evicted, self._retried = self._evicted + grown, 0
        everyone = self._ranks.gather((self._ranks.stage, grown // _WATCHED, in_each_call))
        if not any(evicted or retried for _, evicted, retried in everyone):
            return
        self._overruns += 1
        if self._overruns > _AGAIN:
            self._stop("memory keeps running out under every plan")
            return
        evicted = any(evicted for _, evicted, _ in everyone)
        what = "activations had to be evicted beyond" if evicted else "the allocator had to retry in every call under"
        self._say(f"{what} the plan: planning again")
        self._settled.pop(self._aim(), None)
        self._sizes.aim_at(self._aim())  # it is waited for again, however rare it has become
        if not self.profiled:  # the plan came from a file
            self._profile_again()
            return
        self._go(TRY)
        self._follow(lambda: self._planner().overrun(everyone))

    def _follow_sizes(self, facts: Callable[[], Facts]) -> None:
        """Larger micro-batches need another profile, more of them in a pipeline that was not full only another plan.
        Others run under what there is for larger ones, unless they stay."""
        call, aim, settled = self._call, self._aim(), self.state == SETTLED
        stays = aim.serves(call) or (aim.outranks(call) and not aim.is_as_large(call))
        if stays and not (self._sizes.has_shrunk if settled else self._sizes.has_left):
            return
        made_for = self._settled_for(call, as_small=settled and stays)
        if made_for is None and stays and (not settled or self._reshaped >= _AGAIN):
            return
        self._facts = facts()
        if made_for is not None:
            self._go_back(made_for)
            return
        if aim.is_as_large(call) and not aim.serves(call):
            self._sizes.aim_at(aim._replace(micro_batches=call.micro_batches))
            if self.state == PROFILE:
                return
            if self.profiled:
                self._say(f"{call.micro_batches} micro-batches from now on: planning again")
                self._plan()
                return
        self._sizes.aim_at(call)
        again = f"sequences of {call.seq_length}, micro-batches of {call.micro_batch_size}: profiling again"
        if self.state == PROFILE:  # nothing is lost but this
            self._say(again, logging.INFO)
            self._profile_again()
            return
        self._reshaped += 1
        if self._reshaped > _AGAIN:
            self._stop("shapes keep changing")
            return
        self._say(again)
        self._profile_again()

    def _settled_for(self, call: Call, as_small: bool) -> Call | None:
        """The smallest for which a plan was settled on that serves this one; ``as_small``: and that is no larger."""
        found = [one for one in self._settled if one.serves(call) and (call.is_as_large(one) or not as_small)]
        return min(found, key=lambda one: (one.size, one.micro_batches), default=None)

    def _go_back(self, made_for: Call) -> None:
        """To the plan that was settled on for this."""
        if self._profiler is not None:
            self._profiler.detach()
        config, self.planner, self.profiles, self.profiled, _ = self._settled[made_for]
        if self._adopt(config):
            self._sizes.aim_at(made_for)
            self._go(SETTLED)

    def _settle(self, fits: bool = True) -> None:
        """The plan in force is the one for calls like this."""
        self._settled[self._aim()] = _Settled(self._config, self.planner, self.profiles, self.profiled, fits)
        self._go(SETTLED)

    def _profile_again(self) -> None:
        if self._profiler is not None:
            self._profiler.detach()
        self._adopt(None)
        self._go(SURVIVE)
        self._calls = 1
        self._survive()

    def _aim(self) -> Call:
        """What is profiled or planned for; where there was nothing yet, calls like the one that runs."""
        if self._sizes.aim is None:
            self._sizes.aim_at(self._call)
        assert self._sizes.aim is not None
        return self._sizes.aim

    # ---- deciding together
    def _follow(self, decide: Callable[[], Decision]) -> None:
        """Let rank 0 decide, and do it."""
        decision, incomplete = None, ""
        if self._ranks.rank == 0:
            try:
                with self._telling("searching for a memory plan", "seconds to a minute"):
                    decision = decide()
            except from_profile.IncompleteError as error:
                incomplete = str(error)
            except Exception as error:  # whatever it is, the others wait for a decision
                logger.error("planning failed: %s", error, exc_info=not isinstance(error, _EXPLAINED))
            for line in decision.lines if decision is not None else ():
                logger.info(line)
            if decision is not None and decision.without_effect:
                logger.warning(decision.without_effect)
        decision, incomplete = self._ranks.gather((decision, incomplete))[0]
        if incomplete and self._incomplete < _MORE:
            self._incomplete += 1
            self._say(f"{incomplete}: profiling again")
            self._profile_again()
            return
        if decision is None:
            self._stop(f"planning failed{': ' * bool(incomplete)}{incomplete}")
            return
        if decision.config is not None and not self._adopt(decision.config):
            return
        if decision.settled:
            self._settle(decision.fits)
            self._keep()

    def _adopt(self, config: MemoryConfig | None) -> bool:
        """Put it into force on all ranks; False where it turned out not to fit this model."""
        try:
            self.engine.adopt(config or MemoryConfig(), self._ranks.gather, self._ranks.partners, tell=False)
        except MemoryConfigError as error:  # on all ranks alike
            self.engine.adopt(MemoryConfig(), self._ranks.gather, self._ranks.partners, tell=False)
            self._config = None
            self._stop(f"the plan cannot be executed: {error}")
            return False
        self._config = config
        return True

    def _stop(self, why: str) -> None:
        """Go on as survival alone does, with the plan that is in force."""
        kept = "nothing is planned" if self._config is None else "the plan in force is kept"
        self._say(f"{self.engine.wording.planning} stops planning: {why}; {kept}, and eviction does the rest")
        self.state = OFF

    def _keep(self) -> None:
        """Write down the plan that was settled on, and the profile beside it."""
        if self._ranks.rank != 0 or self.target is None:
            return
        described = self.engine.backend.describe().items()
        machine = {key: value for key, value in described if isinstance(value, str | int | float)}
        planner = self._planner()
        kept = planner.kept or planner.tries[-1]
        sizes = self._aim()._asdict()
        facts = {name: sizes.get(name, fact) for name, fact in self._facts.items()}  # not of a smaller call
        shapes = sizes | {name: facts[fact] for name, fact in _SIZES.items() if fact in facts}
        profile = profile_file.Profile(problem=planner.problem, shapes=shapes, machine=machine)
        try:
            beside = self.target.with_suffix(".profile.json")
            config = plan_file.by_name(kept.config, self.engine.in_force.stacks)
            kept_plan.write(self.target, config, facts, [kept.line()], self.engine.wording.planning)
            profile_file.write(profile, beside)
            logger.info("the plan is kept in %s, the profile in %s", self.target, beside)
        except Exception as error:  # no reason to end a training
            logger.warning("the plan cannot be kept in %s: %s", self.target, error)

    def _limit(self) -> int:
        """What a plan may take of this rank's memory, in bytes."""
        backend = self.engine.backend
        room, allocated, limit = backend.room(), backend.allocated(), backend.limit()
        assert limit is not None  # or nothing would be planned
        if room is not None and allocated is not None:  # contexts are there already
            limit = min(limit, room + allocated)
        return limit - reserve.fragmentation(limit)

    def _planner(self) -> Planner:
        """On rank 0, once there was a plan."""
        assert self.planner is not None
        return self.planner

    def _attached(self) -> Profiler:
        """While calls are profiled."""
        assert self._profiler is not None
        return self._profiler

    def _go(self, state: str) -> None:
        self.state, self._calls = state, 0
        if state == SETTLED:
            LEDGER.forget()  # the report is about the plan, not about how it was found
            self.has_settled = True
        self._evicted, self._retried = self.engine.mover.evicted_bytes, 0
        self._meter.clear()

    def _telling(self, what: str, usually: str) -> AbstractContextManager[None]:
        return progress.shown(what, usually) if self._ranks.rank == 0 else contextlib.nullcontext()

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if self._ranks.rank == 0:
            logger.log(level, text)
