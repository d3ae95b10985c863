"""Which operators run natively, without the hook: those that save nothing that the plan moves or makes again.

That is learnt: a `Watch` follows forwards in which everything goes through the hook, and when two of a kind agree (same
model chunk, same `Signature` of its layers) their `Course` is what the next ones are expected to take. The hook is then
in force around those operators alone that need it, and the ledger counts what the others keep by the bytes of the
course.

Whoever departs from the course loses nothing but memory: what an operator saves natively is right, it only cannot
leave. So it is looked at again every now and then, and forgotten when another operator runs, when shapes change, and
when something that has left is still held.
"""

from __future__ import annotations

from collections import Counter

from mindspeed_mem.activation.course import UNKNOWN, Course, Signature, Watch, held
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.storage.micro_batch import MicroBatch

_LOOK_AGAIN = 64
"""Forwards by one course, after which one is watched again."""
_DEPARTURES = 8
"""After so many forwards that were not as expected nothing more is learnt of their kind."""
_KINDS = 256
"""Kinds of forwards, of each sort, that are remembered: those that came first are forgotten first."""


class NativeOperators:
    """Learns courses, and says by which one the forward that runs is to go."""

    def __init__(self, position: Position, in_force: PlanInForce):
        self._position, self._in_force = position, in_force
        self._plan: object = None
        self._courses: dict[object, Course] = {}
        self._candidates: dict[object, Course] = {}
        self._departures: Counter[object] = Counter()
        self._varying: dict[object, set[int]] = {}
        self._kind: object = None
        self._layers: list[tuple[int, Signature]] = []

    def begin(self) -> None:
        """A forward begins, of which nothing is known yet."""
        self._position.course = self._position.watch = self._kind = None
        self._layers = []

    def enter_layer(self, layer: int, signature: Signature, learns: bool) -> None:
        """A layer is about to run; before the first one of a forward it is decided how that is to go.

        ``learns``: everything may be learnt from here on; nobody measures, or has hooks of their own.
        """
        position, layers = self._position, self._layers
        layers.append((layer, signature))
        if len(layers) > 1:
            course = position.course
            if course is UNKNOWN:
                return
            if course is not None and not (
                learns and len(layers) <= len(course.layers) and course.layers[len(layers) - 1] == layers[-1]
            ):
                self.depart()
            elif not learns:
                position.watch = None
            return
        if self._plan is not self._in_force.plan:
            self._plan = self._in_force.plan
            self._courses, self._candidates, self._departures, self._varying = {}, {}, Counter(), {}
        micro_batch = position.micro_batch
        if not learns or micro_batch is None or micro_batch.count:
            return
        self._kind = kind = micro_batch.key[1], micro_batch.stays, layer, signature
        course = self._courses.get(kind)
        if course is not None:
            course.uses += 1
            if course.uses % _LOOK_AGAIN:
                course.at = 0
                position.course = course if course.natively else None
                return
        if self._departures[kind] < _DEPARTURES:
            position.watch = Watch(self._varying.get(kind, ()))

    def depart(self) -> None:
        """This forward does not go as expected: what is left of it goes through the hook."""
        self._departures[self._kind] += 1
        self._courses.pop(self._kind, None)
        self._candidates.pop(self._kind, None)
        self._position.course = UNKNOWN

    def finish(self, micro_batch: MicroBatch) -> bool:
        """The forward has ended, and what is due in it has left; whether it went as expected, or nothing was."""
        position, kind = self._position, self._kind
        course, watch = position.course, position.watch
        position.course = position.watch = None
        if course is not None and course is not UNKNOWN:
            if len(course.operators) != micro_batch.count + 1 or held(micro_batch.those_moved()) > course.held:
                self.depart()
                position.course = None
                return False
            micro_batch.mover.staying.small_bytes += course.small_bytes
        elif watch is not None and self._layers:
            seen = watch.course(micro_batch, self._in_force, self._layers)
            known = self._courses.get(kind) or self._candidates.get(kind)
            if known is not None and known.same(seen):
                seen.uses = 1
                _remember(self._courses, kind, seen)
                self._candidates.pop(kind, None)
            else:
                self._courses.pop(kind, None)
                if known is not None:
                    self._departures[kind] += 1
                    self._varying.setdefault(kind, set()).update(seen.differs(known))
                _remember(self._candidates, kind, seen)
        return course is not UNKNOWN


def _remember(courses: dict[object, Course], kind: object, course: Course) -> None:
    if kind not in courses and len(courses) >= _KINDS:
        del courses[next(iter(courses))]
    courses[kind] = course
