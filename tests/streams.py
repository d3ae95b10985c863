"""A discrete-event machine that runs memory plans: the reference for the planner's simulation.

Written from what the engine does, without the planner's shortcuts: devices have a compute stream and two copy streams
of queued commands; a command waits for events of others; a heap of times says what ends next. Over a link that blocks
all commands are in one stream. Memory is counted as
commands of the compute stream run. Each operator of each layer is a command of its own.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict

from mindspeed_mem.passes import FORWARD, WEIGHT

GB = 1e9


class Stream:
    """Commands in order: (events to wait for, seconds, events to set, bytes taken at its start, given at its end)."""

    def __init__(self):
        self.queue, self.place, self.running = [], 0, False
        self.waited = 0.0
        self.free_at = 0.0

    def put(self, wait=(), seconds=0.0, sets=(), take=0, give=0, copy_wait=False):
        self.queue.append((tuple(wait), seconds, tuple(sets), take, give, copy_wait))


def problem_splits(problem):
    """Whether gradients of weights are put off."""
    return problem.pipeline.schedule != "1f1b" or problem.pipeline.split_backward


class Machine:
    """All stages of a pipeline. `run` returns seconds and peaks."""

    def __init__(self, problem, plan):
        self.problem, self.plan = problem, plan
        self.weight_copies = 0
        self.begins = [0 for _ in problem.stages]
        """The most that is held on each stage when a backward begins."""
        self.most = None
        if plan.idle_prefetch:
            self.most = Machine(problem, dataclasses.replace(plan, idle_prefetch=False)).begins
        self.late = [[] for _ in problem.stages]  # events of copies out that are due, with their bytes
        self.streams = [
            [Stream()] * 3 if problem.link.blocking else [Stream() for _ in range(3)] for _ in problem.stages
        ]
        for number in range(len(problem.stages)):
            self._enqueue(number)

    def run(self):
        done, now, ended, heap, tie = set(), 0.0, 0.0, [], 0
        held = [s.static_bytes + s.temporary_bytes for s in self.problem.stages]
        peaks = list(held)
        while True:
            progress = True
            while progress:
                progress = False
                for stage, streams in enumerate(self.streams):
                    for which, stream in enumerate(streams):
                        if stream.running or stream.place == len(stream.queue):
                            continue
                        wait, seconds, sets, take, give, _ = stream.queue[stream.place]
                        if any(event not in done for event in wait):
                            continue
                        stream.running, progress = True, True
                        held[stage] += take
                        peaks[stage] = max(peaks[stage], held[stage])
                        tie += 1
                        heapq.heappush(heap, (now + seconds, tie, stage, which, sets, give))
            if not heap:
                break
            now, _, stage, which, sets, give = heapq.heappop(heap)
            stream = self.streams[stage][which]
            stream.running, stream.place = False, stream.place + 1
            ended = now if which == 0 else ended  # a step is over with its computation
            held[stage] -= give
            done.update(sets)
        for streams in self.streams:
            assert all(stream.place == len(stream.queue) for stream in streams), "the machine is stuck"
        return ended + max(s.step_seconds for s in self.problem.stages), peaks

    # ---- what the engine would ask the streams for
    def _enqueue(self, number):
        passes = self.problem.passes[number]
        self.items = {chunk: self._items(number, chunk) for chunk in range(self.problem.virtual_stages)}
        fetched = set()
        self.splits = problem_splits(self.problem)
        for place, (direction, micro_batch, chunk) in enumerate(passes):
            if direction == WEIGHT:
                self._weights(number, micro_batch, chunk)
                continue
            later = [one for one in passes[place + 1 :] if one[0] != WEIGHT]
            coming = later[0] if later else None
            ahead = None
            if coming and coming[0] != FORWARD and coming[1:] != (micro_batch, chunk):
                ahead = coming[1:]
            if direction == FORWARD:
                self._forward(number, micro_batch, chunk, ahead, fetched)
            else:
                self.begins[number] = max(self.begins[number], self._held(number))
                self._backward(number, micro_batch, chunk, ahead, fetched)
            if ahead and self.most is not None:
                self._idle(number, ahead, fetched)
            self.streams[number][0].put(sets=[("pass", number, direction, micro_batch, chunk)])

    def _held(self, number):
        """What computation holds by now, of which every command is known."""
        return sum(take - give for _, _, _, take, give, _ in self.streams[number][0].queue)

    def _idle(self, number, key, fetched):
        """More copies back of the backward that comes, where a pass has ended: as far as a backward has begun with as
        much, and gradients of weights have room for what they bring back two at a time."""
        later = sorted((self._on_host(item) for items in self.items.values() for item in items), reverse=True)
        gradients = [size for chunk in self.items for size in self._gradients(number, chunk).values()]
        room = self.most[number] - self._held(number) - sum(later[:2]) - 2 * max(gradients, default=0)
        far = self.plan.stages[number].distance
        wanted = [
            (-(item["due"] + far), -item["due"], index)
            for index, item in enumerate(self.items[key[1]])
            if item["act"] == "S" and item["group"].bytes > self._on_host(item) and (number, key, index) not in fetched
        ]
        for _, _, index in sorted(wanted):
            item = self.items[key[1]][index]
            room -= item["group"].bytes - self._on_host(item)
            if room < 0:
                break
            self._start(number, key, index, fetched)

    def _layers(self, number, chunk):
        of_chunk = self.problem.stages[number].parts[chunk]
        return [self.problem.class_of[name] for name in of_chunk.layers]

    def _items(self, number, chunk):
        """Every group of every layer with global operator numbers, counted from 1."""
        kinds, base, items = self._layers(number, chunk), 1, []
        for layer, kind in enumerate(kinds):
            names = [operator.name for operator in kind.operators]
            text = self.plan.stages[number].parts[chunk][layer]
            letters = {group.name: letter for group, letter in zip(kind.groups, text, strict=True)}
            for group in kind.groups:
                if letters[group.name] == "-":
                    continue
                if group.from_previous:
                    others = [operator.name for operator in kinds[layer - 1].operators]
                    made = base - len(others) + max(others.index(name) for name in group.operators)
                else:
                    made = base + max(names.index(name) for name in group.operators)
                users = [base + names.index(name) for name in group.used_by]
                items.append(
                    {
                        "group": group,
                        "act": letters[group.name],
                        "made": made,
                        "first": min(users),
                        "last": max(users),
                        "due": self._due(kind, letters, group.name, base),
                    }
                )
            base += len(kind.operators)
        return items

    def _due(self, kind, letters, name, base):
        """When backward needs it: for its own users, or for what is made again from it."""
        names = [operator.name for operator in kind.operators]
        own = max(base + names.index(user) for user in kind.groups[kind.group_index[name]].used_by)
        makes = [g.name for g in kind.groups if name in g.needs and letters[g.name] == "R"]
        return max([own, *(self._due(kind, letters, other, base) for other in makes)])

    def _count(self, number, chunk):
        return sum(len(kind.operators) for kind in self._layers(number, chunk))

    def _tail(self, number, chunk):
        """The final norm is an operator of the last chunk."""
        after = self.problem.stages[number].parts[chunk].after
        return int(bool(after.bytes or after.forward_seconds or after.backward_seconds))

    def _load(self, number, key, position, fetched):
        """Start the copies back that are due when the operator numbered `position` is about to run backward."""
        far = self.plan.stages[number].distance
        found = [
            (item["due"] + far, index)
            for index, item in enumerate(self.items[key[1]])
            if item["act"] == "S" and item["due"] + far >= position and (number, key, index) not in fetched
        ]
        for _, index in sorted(found, reverse=True):
            self._start(number, key, index, fetched)

    def _start(self, number, key, index, fetched):
        compute, _, back = self.streams[number]
        item = self.items[key[1]][index]
        fetched.add((number, key, index))
        copied = ("out", number, key, index)
        if (copied, item["group"].bytes) in self.late[number]:  # it stays: its memory is counted as the copy's now
            self.late[number].remove((copied, item["group"].bytes))
            compute.put(give=item["group"].bytes)
        asked = ("asked", number, key, index)
        size = item["group"].bytes - self._on_host(item)
        compute.put(take=size, sets=[asked])
        seconds = size / GB / self.problem.link.back
        # not after the copy out: what is late by then would stay, and is taken to be copied all the same
        back.put(wait=[asked], seconds=seconds, sets=[("back", number, key, index)])

    def _release(self, number, copied, size):
        """What is due leaves once its copy is done, at the latest when more is late than the window allows.

        It gives its memory as late as that: a machine on which nobody looks whether a copy is done.
        """
        late = self.late[number]
        late.append((copied, size))
        while sum(nbytes for _, nbytes in late) > self.plan.window_bytes:
            copied, size = late.pop(0)
            self.streams[number][0].put(wait=[copied], give=size)

    def _arrival(self, number, direction, micro_batch, chunk):
        """The pass on another stage that has to be done."""
        stages, virtual = len(self.problem.stages), self.problem.virtual_stages
        places = [(stage, turn) for turn in range(virtual) for stage in range(stages)]
        if self.problem.pipeline.schedule == "v":  # the second half comes back
            places[stages:] = reversed(places[stages:])
        other = places.index((number, chunk)) + (-1 if direction == FORWARD else 1)
        if 0 <= other < stages * virtual:
            return [("pass", places[other][0], direction, micro_batch, places[other][1])]
        return []

    def _forward(self, number, micro_batch, chunk, ahead, fetched):
        compute, out, _ = self.streams[number]
        of_chunk, key = self.problem.stages[number].parts[chunk], (micro_batch, chunk)
        items, count, far = self.items[chunk], self._count(number, chunk), self.plan.stages[number].distance
        compute.put(wait=self._arrival(number, FORWARD, micro_batch, chunk), take=of_chunk.before.bytes)
        compute.put(seconds=of_chunk.before.forward_seconds)
        releases = defaultdict(list)
        position = 0
        for kind in self._layers(number, chunk):
            for operator in kind.operators:
                position += 1
                if ahead:
                    left = count - position + 1
                    self._load(
                        number, ahead, self._count(number, ahead[1]) + self._tail(number, ahead[1]) + left, fetched
                    )
                ran = ("ran", number, key, position)
                taken = sum(item["group"].bytes for item in items if item["made"] == position)
                moves = [i["group"] for i in items if i["act"] == "S" and max(i["made"], i["first"]) == position]
                host = sum(group.tensors for group in moves) * self.problem.host.moved_seconds / 2
                compute.put(seconds=operator.forward_seconds + host, take=taken, sets=[ran])
                for index, item in enumerate(items):
                    size = item["group"].bytes
                    if item["act"] == "S" and max(item["made"], item["first"]) == position:
                        seconds = size / GB / self.problem.link.out
                        out.put(wait=[ran], seconds=seconds, sets=[("out", number, key, index)])
                        releases[max(item["made"] + far, position)].append((index, size))
                    if item["act"] == "R" and max(item["made"], item["last"]) == position:
                        compute.put(give=size - item["group"].recompute_keeps)
                for index, size in releases.pop(position, []):
                    self._release(number, ("out", number, key, index), size)
        for index, size in releases.pop(count + 1, []) if self._tail(number, chunk) else ():
            self._release(number, ("out", number, key, index), size)
        compute.put(seconds=of_chunk.after.forward_seconds)
        compute.put(take=of_chunk.after.bytes)
        for due in sorted(releases):
            for index, size in releases[due]:
                self._release(number, ("out", number, key, index), size)

    def _backward(self, number, micro_batch, chunk, ahead, fetched):
        compute = self.streams[number][0]
        of_chunk, key = self.problem.stages[number].parts[chunk], (micro_batch, chunk)
        items, position = self.items[chunk], self._count(number, chunk)
        own = [("pass", number, FORWARD, micro_batch, chunk)]
        compute.put(wait=own + self._arrival(number, "backward", micro_batch, chunk))
        self._load(number, key, position + self._tail(number, chunk) + 1, fetched)
        loss, start = of_chunk.after, of_chunk.before
        waits = [one.weight_bytes * self.splits for one in (loss, start)]
        later = [one.weight_seconds * self.splits for one in (loss, start)]
        count, gradients = position + 1, self._gradients(number, chunk)
        ran = ("ran back", number, key, count)
        compute.put(seconds=loss.backward_seconds - later[0], give=loss.bytes - waits[0], sets=[ran])
        self._leaves(number, ran, gradients.get(count))
        self._load(number, key, position + self._tail(number, chunk), fetched)
        for kind in reversed(self._layers(number, chunk)):
            for operator in reversed(kind.operators):
                self._load(number, key, position, fetched)
                if ahead:
                    last = self._count(number, ahead[1]) + self._tail(number, ahead[1])
                    self._load(number, ahead, last + position, fetched)
                for index, item in enumerate(items):
                    if item["act"] == "S" and item["due"] == position:
                        compute.put(wait=[("back", number, key, index)])
                for item in items:
                    if item["act"] == "R" and item["due"] == position:
                        size = item["group"].bytes - item["group"].recompute_keeps
                        reruns = len(item["group"].recompute_operators or item["group"].operators)
                        host = reruns * self.problem.host.rerun_seconds
                        compute.put(seconds=item["group"].recompute_seconds + host, take=size)
                moved = sum(i["group"].tensors for i in items if i["act"] == "S" and i["due"] == position)
                seconds = operator.backward_seconds - operator.weight_seconds * self.splits
                seconds += moved * self.problem.host.moved_seconds / 2
                ran = ("ran back", number, key, position)
                compute.put(seconds=seconds, take=operator.weight_bytes * self.splits, sets=[ran])
                done = [item["group"] for item in items if item["first"] == position]
                compute.put(give=sum(group.bytes - group.weight_bytes * self.splits for group in done))
                self._leaves(number, ran, gradients.get(position))
                position -= 1
        compute.put(seconds=start.backward_seconds - later[1])
        if self.problem.pipeline.schedule == "1f1b" and self.splits:
            self._weights(number, micro_batch, chunk)
        compute.put(give=start.bytes - waits[1])

    def _gradients(self, number, chunk):
        """Output gradients that are on the host until gradients of weights are computed, by operator."""
        if not self.plan.output_gradients or self.problem.pipeline.schedule == "1f1b":
            return {}
        operators = [operator for kind in self._layers(number, chunk) for operator in kind.operators]
        after = self.problem.stages[number].parts[chunk].after
        sizes = {place: one.gradient_bytes for place, one in enumerate(operators, 1) if one.weight_seconds}
        sizes[len(operators) + 1] = after.gradient_bytes if after.weight_seconds else 0
        return {place: size for place, size in sizes.items() if size}

    def _leaves(self, number, ran, size):
        """An output gradient, once it has been used."""
        if size:
            copied = ("gradient", *ran)
            seconds = size / GB / self.problem.link.out
            self.streams[number][1].put(wait=[ran], seconds=seconds, sets=[copied])
            self._release(number, copied, size)

    def _weights(self, number, micro_batch, chunk):
        """Gradients of weights; what they are made from is counted as theirs until the last of them is there."""
        of_chunk, kinds = self.problem.stages[number].parts[chunk], self._layers(number, chunk)
        outside = (of_chunk.before, of_chunk.after)
        operators = [operator for kind in kinds for operator in kind.operators]
        given = sum(item["group"].weight_bytes - self._on_host(item) for item in self.items[chunk])
        gradients = {place: ({}, size) for place, size in self._gradients(number, chunk).items()}
        given += sum(one.weight_bytes for one in (*outside, *operators)) - sum(size for _, size in gradients.values())
        compute, _, back = self.streams[number]
        linears = [(0, of_chunk.before), *enumerate(operators, 1), (len(operators) + 1, of_chunk.after)]
        linears = [(place, one) for place, one in reversed(linears) if one.weight_seconds]

        def copies(linear):
            found = [(i, self._on_host(i)) for i in self.items[chunk] if i["last"] == linear and self._on_host(i)]
            return sorted([*found, *([gradients[linear]] if linear in gradients else [])], key=lambda one: one[1])

        def fetch(linear):
            for item, size in copies(linear):
                late = (("gradient", "ran back", number, (micro_batch, chunk), linear), size)
                if "group" not in item and late in self.late[number]:  # it stays
                    self.late[number].remove(late)
                    compute.put(give=size)
                self.weight_copies += 1
                item["copy"] = ("for weights", number, self.weight_copies)
                compute.put(take=size, sets=[("asked", item["copy"])])
                back.put(
                    wait=[("asked", item["copy"])], seconds=size / GB / self.problem.link.back, sets=[item["copy"]]
                )

        if linears:
            fetch(linears[0][0])
        for place, (linear, one) in enumerate(linears):
            if place + 1 < len(linears):
                fetch(linears[place + 1][0])
            for item, _ in copies(linear):
                compute.put(wait=[item["copy"]])
            compute.put(seconds=one.weight_seconds, give=sum(size for _, size in copies(linear)))
        compute.put(give=given)

    def _on_host(self, item):
        """What is swapped, and only a gradient of a weight needs, where these are passes."""
        apart = self.problem.pipeline.schedule != "1f1b"
        return item["group"].weight_bytes if apart and item["act"] == "S" and item["group"].weights_only else 0
