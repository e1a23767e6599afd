"""Reference pages: those of docs/ that are made from the code. `make reference` writes them, a test compares them."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import phonograph
import phonograph.hf
from phonograph import errors, settings
from phonograph.cli import flags as cli_flags
from phonograph.cli import serve
from phonograph.cli.main import command_line
from phonograph.engine.execution.speculation_rules import SPECULATION_RULES
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.registry import ALL_PHASES
from phonograph.engine.process.arguments import EngineArguments
from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.requests.request import SamplingParams
from phonograph.graphs.phases.decisions import Reason
from phonograph.graphs.planning.flags import flag_of
from phonograph.graphs.planning.kinds import shown
from phonograph.graphs.planning.rules import RULES
from phonograph.graphs.planning.settings import Settings
from phonograph.graphs.running.runner_options import RunnerOptions
from phonograph.server.app import OPERATIONS, create_app
from phonograph.server.observe.metrics import Metrics
from phonograph.server.observe.watch import Watch
from phonograph.server.options import ServerOptions

DOCS = Path(__file__).parents[1] / "docs"
_MADE = "<!-- Made from the code by `make reference`. -->\n"
_DEPRECATED = "deprecated names of graph flags"

ASKING = """\
from phonograph import LLM, ask

llm = LLM("DIR", asked=[ask("decode.backend", "full"), ask("decode.buckets", (1, 2, 4))])
"""
"""How a setting of the plan is asked for; a test runs it."""

Row = Sequence[str]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; bars within a cell are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _page(title: str, *parts: str) -> str:
    return "\n".join([f"# {title}\n", _MADE, *parts])


# -- attributes and their docstrings ------------------------------------------------------------------------------


@cache
def _attribute_docs(kind: type) -> Mapping[str, str]:
    """The text after each attribute of a class, as its source has it; a base's where the class says nothing."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("phonograph"):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for attribute, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
                name = attribute.target.id
            elif isinstance(attribute, ast.Assign) and isinstance(attribute.targets[0], ast.Name):
                name = attribute.targets[0].id
            else:
                continue
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[name] = str(after.value.value) if is_text and isinstance(after.value.value, str) else ""  # type: ignore[union-attr]
    return found


def _options(kind: Any, by_flag: Mapping[str, str] | None = None) -> str:
    """The fields of a frozen dataclass: name, kind of value, default, flag, what it does."""
    docs = _attribute_docs(kind)
    rows = []
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else f"`{_value(field.default)}`"
        if field.default_factory is not dataclasses.MISSING:
            default = f"`{_value(field.default_factory())}`"
        kinds = " or ".join(f"`{one}`" for one in str(field.type).split(" | "))
        row = [f"`{field.name}`", kinds, default]
        if by_flag is not None:
            flag = by_flag.get(field.name, "")
            row.append(f"`{flag}`" if flag else "")
        rows.append([*row, docs.get(field.name, "")])
    head = ["option", "type", "default", *(["flag"] if by_flag is not None else []), "what it does"]
    return table(head, rows)


def _value(value: object) -> str:
    if isinstance(value, Reason):
        return value.value
    return re.sub(r"<(?:function|class) '?([\w.<>]+).*>", r"\1", repr(value))


def _flags_read_by(function: Callable[..., object]) -> dict[str, str]:
    """Which flag each keyword argument is taken from, as the source of `function` says."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.keyword) and node.arg is not None:
            read = re.search(r"\bargs(?:\.|, ')(\w+)", ast.unparse(node.value))
            if read is not None:
                found[node.arg] = f"--{read[1].replace('_', '-')}"
    return found


def _engine_flags() -> dict[str, str]:
    """The flag of each engine option: the one that it is read from, or the one of its name (`--speculate-depth`)."""
    known = {name for action in dict(_commands(command_line()))["serve"]._actions for name in action.option_strings}
    by_name = {one.name: f"--{one.name.replace('_', '-')}" for one in dataclasses.fields(EngineOptions)}
    return {name: flag for name, flag in by_name.items() if flag in known} | _flags_read_by(cli_flags.arguments_from)


# -- commands ---------------------------------------------------------------------------------------------------------


def _commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, by the words that call it."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, found in action.choices.items():
            yield from _commands(found, f"{name} {word}".strip())


def _graph_defaults() -> dict[str, str]:
    return {flag_of(setting): shown(setting.default) for setting in Settings(ALL_PHASES).table.values()}


def _flag_row(action: argparse.Action) -> Row:
    names = [f"`{name}`" for name in action.option_strings] or [f"`{action.metavar or action.dest}`"]
    takes = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices is not None and action.option_strings:
        takes = ", ".join(map(str, action.choices))
    elif not takes and action.option_strings and action.nargs != 0:
        kind = getattr(action.type, "__name__", "")
        takes = {"int": "a whole number", "float": "a number", "Path": "a file"}.get(kind, "a text")
    default = _graph_defaults().get(action.option_strings[0] if action.option_strings else "", "")
    if not default and action.default not in (None, False, argparse.SUPPRESS) and action.default != []:
        default = str(action.default)
    text = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    return ", ".join(names), takes, f"`{default}`" if default else "", text


def _rows_by_group(parser: argparse.ArgumentParser) -> dict[str, list[Row]]:
    return {
        group.title or "": [_flag_row(one) for one in group._group_actions if one.dest != "help"]
        for group in parser._action_groups
    }


def _is_alias(row: Row) -> bool:
    return " is deprecated; use " in row[3] or " is accepted and changes nothing" in row[3]


def _instead(text: str) -> str:
    """What to write, from the warning of an alias."""
    _, found, instead = text.partition(" is deprecated; use ")
    if not found:
        return f"nothing: {text.partition('changes nothing: ')[2]}"
    flag, space, note = instead.partition(" (")
    return f"`{flag}`{space}{note}"


def commands_page() -> str:
    """Every flag of every command; those that all commands with an engine have are said once."""
    commands = dict(_commands(command_line()))
    grouped = {name: _rows_by_group(parser) for name, parser in commands.items()}
    engines = [name for name, groups in grouped.items() if _DEPRECATED in groups]
    each = [[row for rows in grouped[name].values() for row in rows] for name in engines]
    shared = [row for row in each[0] if all(row in rows for rows in each)]
    head = ("flag", "takes", "default", "what it does")
    deprecated = [row for row in shared if _is_alias(row)]
    graph = [row for row in shared if row in grouped[engines[0]]["graphs"]]
    engine = [row for row in shared if row not in graph and row not in deprecated]
    listed = ", ".join(f"`{name}`" for name in engines)
    parts = [
        "`phonograph COMMAND --help` prints the same. `phonograph --version` prints the version.\n",
        "## Flags of the engine\n",
        f"All commands that open an engine have these: {listed}.\n",
        table(head, engine),
        "## Flags of the graph plan\n",
        f"{listed} have these too. [Options](options.md) says why each default is what it is.\n",
        table(head, graph),
    ]
    for name, groups in grouped.items():
        text = commands[name].description or ""
        parts.append(f"## phonograph {name}\n\n{text[:1].upper()}{text[1:].rstrip('.')}.\n")
        for title, rows in groups.items():
            own = [row for row in rows if name not in engines or row not in (*shared, *deprecated)]
            if own:
                is_plain = title in ("options", "positional arguments", "graphs")
                parts.append(("" if is_plain else f"**{title}**\n\n") + table(head, own))
    parts += [
        "## Names of SGLang's\n",
        "Accepted, so that launch lines carry over; each warns with what to write in its place.\n",
        table(("flag", "write"), [(row[0], _instead(row[3])) for row in deprecated]),
    ]
    return _page("Commands and flags", *parts)


# -- options, reasons, rules ------------------------------------------------------------------------------------------


def _settings_table() -> str:
    rows = [
        (
            f"`{one.name}`",
            one.kind.metavar or "on or off",
            f"`{shown(one.default)}`",
            f"`{flag_of(one)}`",
            one.help,
            one.because,
        )
        for one in Settings(ALL_PHASES).table.values()
    ]
    return table(("setting", "takes", "default", "flag", "what it does", "why this default"), rows)


def options_page() -> str:
    """What Python callers may set: engine, plan, server, sampling, runners."""
    return _page(
        "Options",
        "## The engine: `EngineOptions`\n",
        "`LLM(model, options=EngineOptions(max_len=4096))`. None leaves it to model and memory.\n",
        _options(EngineOptions, _engine_flags()),
        "## The graph plan\n",
        "By name in `--graph-backend '{…}'`, by flag, or in Python by `ask(name, value)`:\n",
        f"```python\n{ASKING}```\n",
        _settings_table(),
        "## The server: `ServerOptions`\n",
        _options(ServerOptions, _flags_read_by(serve._options)),
        "## One request: `SamplingParams`\n",
        _options(SamplingParams, _flags_read_by(cli_flags.params_from)),
        "## A runner: `RunnerOptions`\n",
        "`graphed` has the same by keyword; it makes a plan, whose defaults (above) then hold where it names none.\n",
        _options(RunnerOptions),
    )


def reasons_page() -> str:
    """Why a call is eager, and which rules change a plan."""
    docs = _attribute_docs(Reason)
    reasons = [(f"`{reason.value}`", f"`Reason.{reason.name}`", docs[reason.name]) for reason in Reason]
    rules = [(f"`{rule.name}`", rule.says, "yes" if rule.ignorable else "no") for rule in RULES]
    excluded = [(f"`{rule.name}`", rule.says) for rule in SPECULATION_RULES]
    return _page(
        "Reasons and rules",
        "## Why a call was eager\n",
        "`explain()` counts each, `RunEagerly.reason` has it, and `phonograph:eager_steps_total` is labelled with it. "
        "[Find out why a step was eager](../tutorial/why-was-it-eager.md) shows how to look. PHASE in a flag is "
        "`decode`, `prefill` or another phase; what the flags mean is in [Options](options.md).\n",
        table(("reason", "in Python", "when, and what to do"), reasons),
        "## Rules of the plan\n",
        "A rule that changed a value is named in the plan with its sentence. `--ignore-rule NAME` goes past those that "
        "can be ignored, and the plan records that.\n",
        table(("rule", "what holds once it is applied", "can be ignored"), rules),
        "## Rules of speculation\n",
        "Whoever asks for `--speculate` and for something that it excludes is refused by the rule's name, before "
        "weights are read ([Speculation](../speculation.md#what-it-excludes)).\n",
        table(("rule", "what holds where something is drafted"), excluded),
    )


def exceptions_page() -> str:
    """The exception tree, and what each says."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PhonographError)
    ]
    tree = (errors.__doc__ or "").partition("\n\n")[2].strip()
    rows = [
        (f"`{kind.__name__}`", ", ".join(f"`{base.__name__}`" for base in kind.__bases__), inspect.getdoc(kind) or "")
        for kind in kinds
    ]  # fmt: skip
    return _page(
        "Exceptions",
        "All are importable from `phonograph`. On the command line, a `PhonographError` is printed, with status 2. "
        "`capture()` raises no `CaptureError`: a bucket that can't be recorded stays eager, and the exception is in "
        "its report (`failures`) and in `explain()`; with `strict` a `CoverageError` has its sentence. "
        "[When capture refuses](../how-to/refusals.md) has what to write instead.\n",
        f"```\n{tree}\n```\n",
        table(("exception", "is also", "when"), rows),
    )


# -- routes -----------------------------------------------------------------------------------------------------------


def _routes() -> list[tuple[str, str]]:
    """Method and path of every route that a server has, taken from the app itself; nothing is started."""
    llm = AsyncLLM(EngineArguments(shape="tiny", device="cpu"))
    app: Any = create_app(llm, ServerOptions(allowed_hosts=("*",)), further=Watch(llm, Metrics(), "tiny").routes())
    found = []
    for route in app.routes:
        methods = sorted(set(route.methods or ()) - {"HEAD", "OPTIONS"})
        found += [(method, re.sub(r":\w+}", "}", route.path)) for method in methods]
    return found


def _fields_of(kind: type[msgspec.Struct]) -> str:
    """The fields of a body, with the bounds that its JSON schema has."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    found = components[kind.__name__] if "$ref" in schema else schema
    required = found.get("required", ())
    rows = [(f"`{name}`", _takes(one), "yes" if name in required else "") for name, one in found["properties"].items()]
    return table(("field", "takes", "required"), rows)


def _takes(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: `number from 0 to 1`, `list of text`."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_takes(one) for one in schema["anyOf"] if one != {"type": "null"}))
    if "$ref" in schema:
        return str(schema["$ref"])
    if "enum" in schema:
        return " or ".join(f"`{one}`" for one in schema["enum"])
    kind = {"string": "text", "boolean": "true or false", "integer": "whole number", "array": "list"}
    words: str = kind.get(schema.get("type", "any JSON"), schema.get("type", "any JSON"))
    if isinstance(schema.get("items"), dict) and schema["items"]:
        words += f" of {_takes(schema['items'])}"
    for name, said in (
        ("minimum", "from {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "to {}"),
        ("maxLength", "of at most {} characters"),
        ("maxItems", "(at most {})"),
    ):
        if name in schema and abs(schema[name]) < 2**31 - 1:
            words += f" {said.format(schema[name])}"
    return words


_OTHER_ROUTES = {
    "/openapi.json": "These routes as an OpenAPI 3.1 document",
    "/": "The status page",
    "/status.json": "What the status page shows",
    "/requests/{id}": "What became of a request, as a page",
    "/request.json": "What that page shows, by `?id=`",
    "/metrics": "Metrics for Prometheus: see [Metrics](../metrics.md)",
}
"""Routes whose answers are no types of the API; files of a page (`/page/…`) need no words."""


def routes_page() -> str:
    """Every route, with the fields of bodies."""
    said = {(one.method.upper(), one.path): one.summary for one in OPERATIONS}
    said |= {("GET", path): text for path, text in _OTHER_ROUTES.items()}
    routes = [route for route in _routes() if not route[1].startswith("/page/")]
    unsaid = [route for route in routes if route not in said]
    if unsaid:
        raise ValueError(f"scripts/reference_pages.py: say in _OTHER_ROUTES what {unsaid} are for")
    rows = [(f"`{method} {path}`", said[method, path]) for method, path in routes]
    parts = [
        "What each does, field by field, is in [Serving](../serving.md); `GET /openapi.json` has the same as an "
        "OpenAPI document.\n",
        table(("route", ""), rows),
    ]
    for one in OPERATIONS:
        if one.request is not None:
            statuses = ", ".join(map(str, one.statuses))
            parts.append(f"## {one.method.upper()} {one.path}\n\n{one.summary}. Statuses besides 200: {statuses}.\n")
            parts.append(_fields_of(one.request))
    return _page("Routes", *parts)


# -- environment, names, decisions ------------------------------------------------------------------------------------

_VARIABLES = {
    "XDG_CACHE_HOME": "where caches are: `$XDG_CACHE_HOME/phonograph`, else `~/.cache/phonograph`. Compiled C++ "
    "kernels, measured kernel choices, and what torch.compile made are there; all of it may be removed at any time",
    "XDG_STATE_HOME": "where `phonograph chat` keeps the history of what was typed: `$XDG_STATE_HOME/phonograph`, else "
    "`~/.local/state/phonograph`",
    "TRITON_CACHE_DIR": "where Triton keeps what it compiles, else `~/.triton/cache`; `doctor` shows its size",
    "TORCHINDUCTOR_CACHE_DIR": "where torch's compiler keeps what it compiles; set to a folder of our cache where "
    "nobody set it",
}


def environment_page() -> str:
    """Every variable that settings.py reads, and no other module reads any."""
    names = set(re.findall(r"os\.environ(?:\.get\(|\[)\"(\w+)\"", inspect.getsource(settings)))
    unsaid = names ^ _VARIABLES.keys()
    if unsaid:
        raise ValueError(f"scripts/reference_pages.py: say in _VARIABLES what {', '.join(sorted(unsaid))} does")
    return _page(
        "Environment variables",
        "`settings.py` alone reads the environment. No variable changes how anything is computed; engine and server "
        "are configured by flags and options.\n",
        table(("variable", "what it does"), [(f"`{name}`", text) for name, text in _VARIABLES.items()]),
        "Variables that configure SGLang's graphs (`SGLANG_…GRAPH…`) are not read; one that is set gets a warning that "
        "names the flag to use.\n",
    )


_ROOMS = (
    ("Graphed functions", ("graphs.graphed", "graphs.grid")),
    ("Inputs", ("graphs.inputs",)),
    ("Phases, breaks and decisions", ("graphs.phases",)),
    ("Plans", ("graphs.planning",)),
    ("Runners and captures", ("graphs.running", "graphs.recording")),
    ("Verification", ("graphs.trust",)),
    ("Devices", ("devices",)),
    ("The engine", ("engine",)),
)


def api_page() -> str:
    """Every public name, by the room that it is from; the site fills in signatures and docstrings."""
    left = [name for name in phonograph.__all__ if name in phonograph._MODULES]
    parts = [
        "Everything that `phonograph` exports. What is not here is not public: see "
        "[Compatibility](../explanation/compatibility.md). Exceptions have [a page of their own](exceptions.md).\n"
    ]
    for title, rooms in _ROOMS:
        inside = [name for name in left if phonograph._MODULES[name].removeprefix("phonograph.").startswith(rooms)]
        left = [name for name in left if name not in inside]
        parts.append(f"## {title}\n")
        parts += [f"::: phonograph.{name}\n" for name in sorted(inside, key=lambda name: (name.lower(), name))]
    if left:
        raise ValueError(f"scripts/reference_pages.py: _ROOMS has no place for {', '.join(left)}")
    parts.append("## Hugging Face models\n\n`from phonograph.hf import …`\n")
    parts += [f"::: phonograph.hf.{name}\n" for name in phonograph.hf.__all__]
    return _page("API", *parts)


def decisions_page() -> str:
    """An index of the decisions, by number."""
    rows = []
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        number = path.name.partition("-")[0]
        title = path.read_text().partition("\n")[0].removeprefix("# ").removeprefix(number).lstrip(":. ")
        rows.append((f"[{number}]({path.name})", f"{title[:1].upper()}{title[1:]}"))
    return _page("Decisions", "What was decided, why, and what was not chosen.\n", table(("", "decision"), rows))


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": commands_page,
    "reference/options.md": options_page,
    "reference/routes.md": routes_page,
    "reference/reasons.md": reasons_page,
    "reference/exceptions.md": exceptions_page,
    "reference/environment.md": environment_page,
    "reference/api.md": api_page,
    "decisions/index.md": decisions_page,
}


def main() -> int:
    """Write every page that is not what it should be."""
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
