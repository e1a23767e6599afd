"""`phonograph serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phonograph import interrupts
from phonograph.cli.flags import add_engine_flags, arguments_from
from phonograph.errors import PlanError
from phonograph.graphs.progress import bar

if TYPE_CHECKING:
    from phonograph.engine.process.async_llm import AsyncLLM
    from phonograph.server.options import ServerOptions

log = logging.getLogger("phonograph")

HELP = "serve the OpenAI API over HTTP"
TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral", "json")
REASONING_PARSERS = ("auto", "none", "think", "deepseek_r1", "qwen3", "mistral")
"""The names in `server.openai.reasoning`, repeated: the server's packages may be missing when flags are parsed."""
_VLLM_NAMES = {"--tool-parser": ("--tool-call-parser",)}
"""vLLM's names for our flags, so that launch lines carry over."""
_VLLM_SWITCHES = {"--enable-auto-tool-choice": "tool calls are parsed whenever a request has tools"}
_LEVELS = ("debug", "info", "warning", "error")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    where = parser.add_argument_group("where")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to bind; 0.0.0.0 accepts other machines: then set a key"
    )
    where.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    where.add_argument("--served-name", action="append", default=[], help="the model's name in requests; repeatable")
    where.add_argument("--chat-template", type=Path, help="a file with a chat template, in place of the model's own")
    where.add_argument("--api-key-file", type=Path, help="a file with API keys, one a line; requests need one of them")
    where.add_argument(
        "--allowed-hosts", nargs="+", default=[], help="allowed names in the Host header; * is any (see the docs)"
    )
    where.add_argument("--cors-origins", nargs="+", default=[], help="origins whose web pages may use this server")
    where.add_argument(
        "--api-key", action="append", default=[], help="an API key; other users of the machine can see it"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue", type=int, default=1024, help="sequences that may wait in the queue; beyond that a 429"
    )
    limits.add_argument("--max-body-bytes", type=int, default=8 << 20, help="a larger body gets a 413")
    limits.add_argument("--max-prompt-chars", type=int, help="characters of a prompt; default: what could fit")
    limits.add_argument(
        "--max-connections", type=int, default=4096, help="beyond that the longest idle ones are closed"
    )
    limits.add_argument("--head-timeout", type=float, default=10.0, help="seconds for headers to arrive; else a 408")
    limits.add_argument("--body-timeout", type=float, default=30.0, help="seconds for a body to arrive; else a 408")
    limits.add_argument("--request-timeout", type=float, help="seconds for a request to finish; else a 504")
    limits.add_argument(
        "--stall-timeout", type=float, default=60.0, help="a client that reads nothing for this many seconds is dropped"
    )
    limits.add_argument(
        "--drain-timeout", type=float, default=30.0, help="seconds for running requests to finish on SIGTERM"
    )
    limits.add_argument("--max-restarts", type=int, default=5, help="restarts in a row of an engine core that died")
    limits.add_argument(
        "--core-timeout", type=float, default=300.0, help="seconds of silence after which the engine core is restarted"
    )
    _add_answer_flags(parser)
    log = parser.add_argument_group("log")
    log.add_argument("--log-level", choices=_LEVELS, default="info", help="info has a line for each request")
    log.add_argument("--log-prompts", action="store_true", help="write prompts and outputs to the log")
    add_engine_flags(parser)


def _add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """How outputs are parsed, and how long responses are stored."""
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--tool-parser",
        *_VLLM_NAMES["--tool-parser"],
        choices=TOOL_PARSERS,
        default="auto",
        help="format of tool calls; auto: by the model's chat template, none: tool calls are not parsed",
    )
    answers.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="format of reasoning; auto: by the model's chat template, none: it stays in the content",
    )
    answers.add_argument(
        "--content-special-tokens",
        choices=("text", "special"),
        default="text",
        help="how special tokens in message texts are tokenized; as special tokens, user input could end a message",
    )
    for flag, because in _VLLM_SWITCHES.items():
        answers.add_argument(flag, action="store_true", help=f"accepted, without effect: {because}")
    answers.add_argument(
        "--response-store-bytes",
        type=int,
        default=64 << 20,
        help="bytes of stored responses (/v1/responses); 0 stores none",
    )
    answers.add_argument(
        "--response-store-seconds", type=float, default=24 * 3600.0, help="seconds for which a response is stored"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    try:
        from phonograph.server import run as server
        from phonograph.server.app import create_app
        from phonograph.server.observe.metrics import Metrics
        from phonograph.server.observe.status_page import PUBLIC_PATHS
        from phonograph.server.observe.watch import Watch
    except ImportError as error:
        raise PlanError(
            f"starting the server: the package {error.name} is missing. Run: pip install 'phonograph[server]'"
        ) from None
    from phonograph.engine.process.async_llm import AsyncLLM
    from phonograph.engine.process.client import Restarts

    level = _logging(args.log_level)
    options = _options(args)
    sock = server.listen(options)
    if options.is_open:
        log.warning("anyone who can reach %s may send requests. Require a key: --api-key-file", options.host)
    metrics = Metrics()
    llm = AsyncLLM(
        arguments_from(args),
        observers=[metrics],
        max_queue=options.max_queue,
        chat_template=_read(args.chat_template) if args.chat_template is not None else None,
        restarts=Restarts(most=args.max_restarts, silence=args.core_timeout),
        log_level=max(level, logging.WARNING),
    )

    watch = Watch(llm, metrics, (options.names or (llm.arguments.name,))[0])
    app = create_app(llm, options, further=watch.routes(), open_paths=PUBLIC_PATHS)

    drawn = bar()

    async def work() -> signal.Signals | None:
        async with watch:
            return await server.run(
                llm,
                app,
                options,
                sock,
                progress=lambda *step: _written(sys.stderr, lambda: drawn(*step)),
                on_ready=lambda: _written(sys.stdout, lambda: print(screen(llm, options, sock), flush=True)),
            )

    try:
        early = _run(work())
    finally:
        for stream in (sys.stdout, sys.stderr):
            _written(stream, stream.flush)
    return interrupts.STATUS if early is signal.SIGINT else 0


def _logging(name: str) -> int:
    """Configure logging; returns the level of this name."""
    level: int = getattr(logging, name.upper())
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(max(level, logging.ERROR))
    return level


def _written(stream: TextIO, write: Callable[[], None]) -> None:
    """Write; a full disk or a closed pipe ends the log, and not the server."""
    try:
        write()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is not sys.stderr:
            log.warning("logging to %s stopped: %s", stream.name, error)


def _options(args: argparse.Namespace) -> ServerOptions:
    from phonograph.server.options import ServerOptions

    return ServerOptions(
        host=args.host,
        port=args.port,
        names=tuple(args.served_name),
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        content_special_tokens=args.content_special_tokens,
        api_keys=(*args.api_key, *(_keys(args.api_key_file) if args.api_key_file is not None else ())),
        max_queue=args.max_queue,
        response_store_bytes=args.response_store_bytes,
        response_store_seconds=args.response_store_seconds,
        max_body_bytes=args.max_body_bytes,
        max_prompt_chars=args.max_prompt_chars,
        max_connections=args.max_connections,
        head_timeout=args.head_timeout,
        allowed_hosts=tuple(args.allowed_hosts),
        cors_origins=tuple(args.cors_origins),
        body_timeout=args.body_timeout,
        request_timeout=args.request_timeout,
        stall_timeout=args.stall_timeout,
        drain_timeout=args.drain_timeout,
        log_prompts=args.log_prompts,
    )


def _keys(path: Path) -> list[str]:
    """The keys of a file, one a line; blank lines and lines that begin with # are skipped."""
    lines = [line.strip() for line in _read(path).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise PlanError(
            f"reading {path}: there is no key in it. Add one, or leave --api-key-file out for a server without keys."
        )
    return keys


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"reading {path}: {error}. Give a UTF-8 text file that can be read.") from None


def _run(work: Coroutine[None, None, signal.Signals | None]) -> signal.Signals | None:
    """With uvloop where it is installed: it leaves more CPU time to the core."""
    try:
        import uvloop
    except ImportError:
        new_loop = None
    else:
        new_loop = uvloop.new_event_loop
    with interrupts.left_to_asyncio(), asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)


def screen(llm: AsyncLLM, options: ServerOptions, sock: socket.socket) -> str:
    """What is served, with which plan and why, and the line to try."""
    about, name = llm.about, (options.names or (llm.arguments.name,))[0]
    limits, port = about.limits, sock.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{port}"
    key = ' -H "Authorization: Bearer KEY"' if options.api_keys else ""
    route, body = (
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}',
        )
        if llm.tokenizer is not None
        else ("/v1/completions", '{"prompt": [1, 2, 3]}')
    )
    return "\n".join(
        [
            "",
            f"model     {name}: {about.architecture}, {about.num_layers} layers, {about.dtype}",
            f"          {about.source}",
            f"          {about.implementation}",
            f"device    {about.device}",
            f"KV cache  {limits.capacity:,} tokens in pages of {limits.page_size}; "
            f"{limits.max_seqs} sequences of at most {limits.context} at a time",
            *([f"drafts    {about.speculation}"] if about.speculation is not None else []),
            "",
            about.plan,
            "",
            *about.captured,
            about.coverage,
            about.checks,
            "",
            f"serving   {url}   API key: {'needed' if options.api_keys else 'none'}",
            f"try       curl {url}{route}{key} -H 'Content-Type: application/json' -d '{body}'",
        ]
    )
