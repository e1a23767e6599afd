"""Start-up verification: recordings are checked before the first request, and a failure refuses to start."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from phonograph.engine.execution.executor import Executor
from phonograph.engine.options import VerifyMode
from phonograph.errors import VerifyError
from phonograph.graphs.planning.kinds import GuardMode
from phonograph.graphs.progress import Progress
from phonograph.graphs.recording.capture_report import CaptureReport
from phonograph.graphs.trust.guard import GuardReport, guard
from phonograph.graphs.trust.verify import VerifyReport, verify, verify_some

log = logging.getLogger("phonograph")

_SHARE = 0.045
"""Share of the capture time that `fast` may spend; what it looks at in any case may take more."""


@torch.inference_mode()
def verify_recordings(
    executor: Executor, mode: VerifyMode, reports: Sequence[CaptureReport], progress: Progress
) -> dict[str, VerifyReport]:
    """What was found, by phase; phases without recordings have nothing to check."""
    # The largest first: what is looked at in any case takes longest there, and the others have what it leaves.
    largest = sorted(executor.runners.items(), key=lambda one: -max((key.size for key in one[1].captured), default=0))
    recorded = {name: runner for name, runner in largest if runner.captured}
    if mode == "fast":
        recorded = {name: runner for name, runner in recorded.items() if executor.passes[name].declared.serves}
    if mode == "off":
        return {}
    seconds, begun = _SHARE * sum(report.seconds for report in reports), time.perf_counter()
    found: dict[str, VerifyReport] = {}
    for index, (name, runner) in enumerate(recorded.items()):
        if mode == "all":
            found[name] = verify(runner, progress=progress)
        else:
            progress(f"verifying {name}", index, len(recorded))
            left = seconds - (time.perf_counter() - begun)
            share = max(0.0, left / (len(recorded) - index))
            found[name] = verify_some(runner, seconds=share, hurried=executor.device.torch_device.type != "cpu")
            progress(f"verifying {name}", index + 1, len(recorded))
        runner.verified = found[name].verified
    return found


@torch.inference_mode()
def guard_recordings(executor: Executor, mode: VerifyMode, progress: Progress) -> dict[str, GuardReport]:
    """What recordings would freeze, by phase, as far as capture has not looked: other sizes, and nodes.

    Only where everything is checked. Nodes of the emulated device are the ops, which need no second look.
    """
    nodes, found = executor.device.torch_device.type != "cpu", dict[str, GuardReport]()
    for name, runner in executor.runners.items() if mode == "all" else ():
        is_left = nodes or runner.options.guarded != "all"
        if runner.captured and runner.options.guard != "off" and is_left:
            found[name] = guard(runner, nodes=nodes, progress=progress)
    return found


def refuse_findings(found: Mapping[str, GuardReport], mode: GuardMode) -> None:
    """Raise where a recording holds a value of its sample, or say so where that is all that was asked for."""
    failed = {name: report for name, report in found.items() if not report.ok}
    reports = "\n".join(f"{name}: {report}" for name, report in failed.items())
    if failed and mode == "report":
        log.warning("recorded all the same: %s", reports)
    elif failed:
        name = next(iter(failed))
        raise VerifyError(
            f"guarding the recordings before the first request: those of {', '.join(failed)} depend on the sample that "
            "they were made with, or could not be looked at, so the engine does not start. Run that phase without "
            f"graphs (--{name}-graph-backend disabled), or start it as it is (--graph-guard report) and expect wrong "
            f"tokens.\n{reports}"
        )


def refuse_failures(found: Mapping[str, VerifyReport]) -> None:
    """Raise where a replay differs from the eager path: it would serve wrong tokens."""
    failed = {name: report for name, report in found.items() if not report.ok}
    if failed:
        reports = "\n".join(f"{name}: {report}" for name, report in failed.items())
        name = next(iter(failed))
        raise VerifyError(
            f"verifying the recordings before the first request: replays of {', '.join(failed)} differ from the eager "
            f"path, so the engine does not start. Run that phase without graphs (--{name}-graph-backend disabled), or "
            f"start it as it is (--verify off) and expect wrong tokens.\n{reports}"
        )
