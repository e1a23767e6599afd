"""Explanation of a runner: what is captured, how often each recording was replayed, and why calls ran eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from phonograph.graphs.phases.decisions import Reason, RunEagerly, ShapeKey
from phonograph.graphs.running.entries import RecordingEntry

if TYPE_CHECKING:
    from phonograph.graphs.running.runner import Runner


def explained(
    runner: Runner, entries: Mapping[ShapeKey, RecordingEntry], refused: Mapping[ShapeKey, RunEagerly]
) -> str:
    """In lines, for people."""
    stats = runner.stats
    on = runner.device.torch_device.type if runner.plan.backend == "disabled" else runner.device.name
    lines = [f"{runner.phase.name}: backend {runner.plan.backend} on {on}, {len(entries)} recordings"]
    if entries:
        lines.append(f"  {'recording':<28} {'graphs':>6} {'replays':>9} {'padding':>8}")
        for key, entry in sorted(entries.items(), key=lambda item: item[0].in_table_order):
            num_graphs = len(entry.recording.graphs)
            lines.append(f"  {key!s:<28} {num_graphs:>6} {stats.replays[key]:>9} {stats.padding(key):>8.1%}")
    for row in runner.report.failures if runner.report else ():
        lines.append(f"  {row.key} stays eager: {row.error}")
    mistrusted = (one.detail for one in refused.values() if one.reason is Reason.MISTRUSTED)
    lines += [f"  eager since then: {detail}" for detail in mistrusted]
    lines += [f"  left out: {one}" for one in (runner.selection.left_out if runner.selection else ())]
    lines += [f"  {key} is served by {other}" for key, other in runner.standing_in.items()]
    lines.append(f"  {stats.replays.total()} replays, {stats.eager.total()} eager calls")
    for reason, count in stats.eager.most_common():
        lines.append(f"    {count} {reason.value}: {stats.details[reason]}")
    if runner.facts:
        lines.append(f"  facts: {runner.facts.summary}")
    lines.append(f"  buffers: {runner.pool.report()}")
    return "\n".join(lines)
