"""Explained: a runner's recordings, counts and reasons, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phonograph.graphs.phases.decisions import Reason

if TYPE_CHECKING:
    from phonograph.graphs.running.runner import Runner


def explained(runner: Runner) -> str:
    """What is captured, how often each recording was replayed, and why calls ran eagerly."""
    stats, report, plan = runner.stats, runner.report, runner.plan
    on = runner.device.torch_device.type if plan.backend == "disabled" else runner.device.name
    lines = [f"{runner.phase.name}: backend {plan.backend} on {on}, {len(runner.captured)} recordings"]
    if runner.captured:
        lines.append(f"  {'recording':<28} {'graphs':>6} {'replays':>9} {'padding':>8}")
        for key in sorted(runner.captured, key=lambda key: key.in_table_order):
            num_graphs, counts = len(runner.recording(key).graphs), stats.recordings[key]
            lines.append(f"  {key!s:<28} {num_graphs:>6} {counts.replays:>9} {counts.padding(key.size):>8.1%}")
    lines += [f"  {note}" for note in runner.backend.notes]
    for row in report.failures if report else ():
        lines.append(f"  {row.key} stays eager: {row.error}")
    lines += [f"  recorded all the same: {one}" for one in (report.reported if report else ())]
    mistrusted = (one.detail for one in runner.refused.values() if one.reason is Reason.MISTRUSTED)
    lines += [f"  {'refused' if runner.options.strict else 'eager'} since then: {detail}" for detail in mistrusted]
    lines += [f"  verified: {runner.verified.summary}"] if runner.verified else []
    lines += [f"  left out: {one}" for one in (runner.selection.left_out if runner.selection else ())]
    lines += [f"  {key} is served by {other}" for key, other in runner.standing_in.items()]
    lines.append(f"  {stats.num_replays} replays, {stats.eager.total()} eager calls")
    for reason, count in stats.eager.most_common():
        lines.append(f"    {count} {reason.value}: {stats.details[reason]}")
    if runner.facts:
        lines.append(f"  facts: {runner.facts.summary}")
    lines.append(f"  buffers: {runner.pool.report()}")
    return "\n".join(lines)
