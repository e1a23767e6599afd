"""The measurement of what ordinary launches cost replays, in small."""

from __future__ import annotations

from launch_state import measure, opened

from phonograph.engine.ops.layers.reference import ReferenceKernels


def test_all_states_are_measured_and_the_engine_resumes_again() -> None:
    llm, resumed = opened(tiny=True, sizes=[1, 2], length=20), list[str]()
    kernels = llm.executor.model.kernels
    assert isinstance(kernels, ReferenceKernels)
    own = kernels.resume_overlap

    def resume() -> None:
        resumed.append("")
        own()

    kernels.resume_overlap = resume  # type: ignore[method-assign]
    found = measure(llm, 2, 20)
    assert list(found) == ["after a start", "after ordinary launches", "resumed", "the engine resumes"]
    assert all(taken > 0 for taken in found.values())
    # By its seat, once by hand, and with the update at the end; between these the engine resumes nothing.
    assert len(resumed) == 3
