"""`phonograph explain`: what a model is and the plan, without loading weights, or before they are downloaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from phonograph.cli.flags import add_engine_flags, arguments_from
from phonograph.engine.passes.registry import TARGET_VERIFY, passes_for, phases_of

if TYPE_CHECKING:
    import torch

    from phonograph.engine.execution.speculation import Chosen
    from phonograph.engine.options import EngineOptions
    from phonograph.engine.process.arguments import EngineArguments
    from phonograph.engine.requests.limits import Limits
    from phonograph.graphs.planning.resolve import Plan

HELP = "print whether and how a model is served, and the plan; of a folder, config.json is enough"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_engine_flags(parser)
    parser.add_argument(
        "--trace",
        nargs="?",
        const="all",
        metavar="PHASE",
        help="load and record the model, and show the ops of a phase, or of all: for each its line, arguments and what "
        "it reads, in the smallest recording of every product; and what the guard finds in these, and can't see",
    )


def run(args: argparse.Namespace) -> int:
    """Print what the model is, and every setting of its phases with source and reason."""
    from phonograph.devices import open_device
    from phonograph.engine.checkpoints.base import MakesModel, breaks_of, implementation_of
    from phonograph.engine.checkpoints.generation_config import described
    from phonograph.engine.execution.shadow import described_checks
    from phonograph.engine.execution.sizing import limits_for, plan_for
    from phonograph.engine.execution.speculation import choose_drafter
    from phonograph.engine.kernel_selection import refuse_unsupported
    from phonograph.engine.precision import precision_for
    from phonograph.engine.requests.request import SamplingParams

    arguments = arguments_from(args)
    checkpoint, device = arguments.checkpoint(needs_weights=args.trace is not None), open_device(args.device)
    config, precision = checkpoint.config, precision_for(checkpoint, arguments.options, device.torch_device)
    plan = plan_for(
        device,
        arguments.asked,
        arguments.options,
        on_cpu_by_default=args.device in (None, "cpu"),
        architecture=config.architecture,
        breaks=breaks_of(checkpoint),
    )
    refuse_unsupported(device, precision.applied_to(arguments.options), plan)
    # Refuses whatever loading would refuse, except for the values of the weights, which are not read.
    eos_ids = config.eos_ids
    missing = _not_there_yet(arguments) if arguments.shape is None else []
    if arguments.shape is None and "tokenizer.json" not in missing:
        eos_ids = checkpoint.tokenizer().eos_ids
        checkpoint.chat_template()
    limits = limits_for(arguments.options, device, plan, config.max_len, eos_ids)
    drafter = choose_drafter(arguments.options, checkpoint)
    if isinstance(checkpoint, MakesModel):
        checkpoint.check(limits.num_positions)
    print(
        f"{arguments.name}: {config.num_layers} layers of {config.hidden}, vocabulary of {config.vocab:,}; "
        f"up to {limits.max_seqs} sequences of {limits.context}, {_step_tokens(limits, arguments.options)}"
    )
    print(f"model: {implementation_of(checkpoint, precision.dtype, device.torch_device)}")
    if missing:
        print(f"files: {' and '.join(missing)} not there yet; nothing in config.json speaks against serving it")
    print(f"precision: {precision}")
    print(described(checkpoint.sampling if arguments.options.sampling == "model" else SamplingParams()))
    print(described_checks(arguments.options, is_recorded=plan.is_recorded))
    print(f"speculation: {_speculation(drafter, arguments.options, device.torch_device, plan)}")
    print(plan.explain())
    if args.trace is not None:
        print(_traces(arguments, args.trace))
    return 0


def _step_tokens(limits: Limits, options: EngineOptions) -> str:
    """How many tokens a step has, and why more than were asked for."""
    found = f"{limits.max_tokens:,} tokens a step"
    if options.max_tokens is None or options.max_tokens == limits.max_tokens:
        return found
    return f"{found} (not {options.max_tokens:,}: {limits.tokens_per_row} of each sequence that decodes)"


def _speculation(drafter: Chosen | None, options: EngineOptions, device: torch.device, plan: Plan) -> str:
    """Who drafts, how much and when."""
    from phonograph.engine.execution.speculation import when_for

    if drafter is None:
        return "off"
    when = "wherever a request allows drafts"
    if when_for(options, device) == "pays":
        # Costs are measured by replays: without recordings there is nothing to go by.
        is_measured = plan.phase(TARGET_VERIFY.name).backend != "disabled"
        pays = "where that pays (what a round costs is measured at start)"
        when = pays if is_measured else f"{when} (where that pays is not known, since rounds are not recorded)"
    return f"{drafter}, {options.draft_depth} a round, {when}"


def _not_there_yet(arguments: EngineArguments) -> list[str]:
    """What a folder lacks that holds its configuration alone, as before a download; nothing for any other model."""
    from phonograph.engine.checkpoints.safetensors import weight_files

    folder = Path(arguments.model).expanduser() if arguments.model is not None else None
    if folder is None or not folder.is_dir() or weight_files(folder, needed=False):
        return []
    return ["weights", *(["tokenizer.json"] if not (folder / "tokenizer.json").is_file() else [])]


def _traces(arguments: EngineArguments, phase: str) -> str:
    """The ops of the smallest recording of every product, and what the guard finds in these and can't see."""
    import torch

    from phonograph.graphs.planning.kinds import unknown
    from phonograph.graphs.progress import silent
    from phonograph.graphs.trust.guard import guard, traced

    options = arguments.options
    phases = phases_of(passes_for(embeddings=options.embeddings, speculates=options.speculates))
    names = [declared.name for declared in phases]
    if phase not in ("all", *names):
        raise unknown("phase", phase, ("all", *names), "--trace")
    llm = arguments.open(silent)
    lines: list[str] = [str(covered) for covered in llm.executor.coverage.values()]
    nodes = llm.device.torch_device.type != "cpu"
    for name, runner in llm.executor.runners.items():
        if phase in ("all", name):
            smallest = {key.group: key for key in sorted(runner.captured, key=lambda key: -key.size)}
            lines += [str(traced(runner, key)) for key in smallest.values()]
            found = runner.report.findings if runner.report is not None else ()
            lines += [f"{name}: found at capture: {one}" for one in found]
            if smallest:
                with torch.inference_mode():
                    lines.append(f"{name}: {guard(runner, keys=tuple(smallest.values()), nodes=nodes)}")
            else:
                lines.append(f"{name}: nothing is recorded, so there is no trace")
    return "\n".join(lines)
