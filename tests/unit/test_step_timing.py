"""StepTiming: which steps are measured, and how the others count."""

from __future__ import annotations

from dataclasses import dataclass, field

from phonograph import EmulatedDevice
from phonograph.engine.execution.step_timing import ALL_OF_FIRST, EVERY, PassTime, StepTiming
from phonograph.engine.requests.step import StepKind

DECODE: tuple[str, StepKind] = ("decode", "plain")
PHASES = ("decode", "prefill")


@dataclass
class Clock:
    """A fence that was reached so many seconds after every other."""

    seconds: float
    asked: list[object] = field(default_factory=list)

    def record(self) -> None:
        raise AssertionError("the step's own fence is recorded by whoever launches it")

    def synchronize(self) -> None: ...

    def seconds_since(self, earlier: object) -> float:
        self.asked.append(earlier)
        return self.seconds


def test_the_first_steps_of_a_kind_are_measured_and_then_one_in_sixteen_by_chance() -> None:
    timing, later = StepTiming(EmulatedDevice(), 3, PHASES), 2000 * EVERY
    steps = timing.steps[DECODE]
    begun = [steps.begin() for _ in range(ALL_OF_FIRST + later)]
    measured = [index for index, fence in enumerate(begun) if fence is not None]
    assert measured[:ALL_OF_FIRST] == list(range(ALL_OF_FIRST))
    assert 1800 < len(measured) - ALL_OF_FIRST < 2200
    by_place = [sum(index % EVERY == place for index in measured[ALL_OF_FIRST:]) for place in range(EVERY)]
    assert min(by_place) > 80, "steps with a rhythm of sixteen are measured at every beat"
    assert timing.steps["prefill", "plain"].begin() is not None, "another phase has first steps of its own"
    assert timing.steps["decode", "round"].begin() is not None, "and so has another kind"


def test_another_share_holds_from_the_next_step_on() -> None:
    timing = StepTiming(EmulatedDevice(), 3, PHASES)
    steps = timing.steps[DECODE]
    timing.every = 1000
    assert sum(steps.begin() is None for _ in range(100)) > 50
    timing.every = 1
    assert all(steps.begin() is not None for _ in range(2 * EVERY))


def test_a_step_that_is_not_measured_counts_as_the_last_that_was() -> None:
    timing, short, long = StepTiming(EmulatedDevice(), 3, PHASES), Clock(1.0), Clock(3.0)
    steps = timing.steps[DECODE]
    begun = steps.begin()
    assert timing.seconds == {}, "what is launched counts when it was read"
    steps.add("replay", begun, short)
    steps.add("replay", None, long)
    steps.add("replay", begun, long)
    steps.add("eager", None, long)
    assert short.asked == [begun]
    assert long.asked == [begun]
    assert timing.seconds == {("decode", "replay"): 5.0, ("decode", "eager"): 3.0}
    assert timing.passes == {DECODE: PassTime(4, 8.0)}
