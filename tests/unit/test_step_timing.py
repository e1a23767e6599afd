"""StepTiming: which steps are measured, and how the others count."""

from __future__ import annotations

from dataclasses import dataclass, field

from phonograph import EmulatedDevice
from phonograph.engine.execution.step_timing import ALL_OF_FIRST, EVERY, PassTime, StepTiming
from phonograph.engine.requests.step import StepKind

DECODE: tuple[str, str, StepKind] = ("decode", "replay", "plain")


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


def test_the_first_steps_of_a_kind_are_measured_and_then_one_in_eight_by_chance() -> None:
    timing, later = StepTiming(EmulatedDevice(), 3), 1000 * EVERY
    begun = [timing.begin("decode", "plain") for _ in range(ALL_OF_FIRST + later)]
    measured = [index for index, fence in enumerate(begun) if fence is not None]
    assert measured[:ALL_OF_FIRST] == list(range(ALL_OF_FIRST))
    assert 800 < len(measured) - ALL_OF_FIRST < 1200
    by_place = [sum(index % EVERY == place for index in measured[ALL_OF_FIRST:]) for place in range(EVERY)]
    assert min(by_place) > 60, "steps with a rhythm of eight are measured at every beat"
    assert timing.begin("prefill", "plain") is not None, "another phase has first steps of its own"
    timing.every = 1
    assert all(timing.begin("decode", "plain") is not None for _ in range(2 * EVERY))


def test_a_step_that_is_not_measured_counts_as_the_last_that_was() -> None:
    timing, short, long = StepTiming(EmulatedDevice(), 3), Clock(1.0), Clock(3.0)
    begun = timing.begin("decode", "plain")
    timing.add(DECODE, begun, short)
    timing.add(DECODE, None, long)
    timing.add(DECODE, begun, long)
    timing.add(("decode", "eager", "plain"), None, long)
    assert short.asked == [begun]
    assert long.asked == [begun]
    assert timing.seconds == {("decode", "replay"): 5.0, ("decode", "eager"): 3.0}
    assert timing.passes["decode", "plain"] == PassTime(4, 8.0)
