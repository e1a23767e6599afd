"""Chat templates: messages into the one text that the model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phonograph.engine.json_fields import Fields
from phonograph.engine.text.side_files import SideFiles
from phonograph.errors import CheckpointError, RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, object]

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Names that every template is given, or is not given on purpose: no request sets them by `variables`."""


_LAST = "\ue000end of the last message\ue000"
"""Marks a place in a rendered text; its first character is one that is assigned to nothing."""


class ChatTemplate:
    """A model's chat template; without one, `render` refuses and says so."""

    def __init__(
        self, template: str | None, special_tokens: Mapping[str, str] | None = None, source: str = "the model"
    ) -> None:
        self.source = Path(source).name
        """Its name in error messages: clients read these, and must not learn the file's path."""
        self.text = template
        """As the model has it."""
        self._special_tokens = dict(special_tokens or {})
        self._written = template or ""
        self._template = None if template is None else _compiled(template, source)
        names = frozenset[str]() if template is None else _names_in(template)
        self.takes_tools = "tools" in names
        """Whether tools have a place in the prompt; where they have none, giving some would do nothing."""
        self.variables = names - _GIVEN
        """Further names that the template reads, such as Qwen3's `enable_thinking`."""
        self.shows_tools_whole = template is not None and _shows_tools_whole(template)
        """Whether it hands tools, or their functions, on as a whole: then every field of them reaches the model."""
        self.message_fields = frozenset[str]() if template is None else _fields_in(template)
        """Names of fields that the template may read of a message, such as `reasoning_content`."""

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """From chat_template.jinja, or from tokenizer_config.json, of a Hugging Face folder."""
        return cls(_read_template(folder), SideFiles.read(folder).special_tokens, str(folder))

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message has a place in the prompt; some templates refuse or leave out what one says."""
        asked = [{"role": "system", "content": _LAST}, {"role": "user", "content": "a"}]
        try:
            return _LAST in self.render(asked)
        except RequestError:
            return False

    def mentions(self, text: str) -> bool:
        """Whether the template has this text in it, as it is written."""
        return text in self._written

    def continued(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for messages of which the last is gone on with: it ends where the text of that ends."""
        *before, last = messages
        marked = {**last, "content": f"{last.get('content')}{_LAST}"}
        text = self.render([*before, marked], add_generation_prompt=False, tools=tools, variables=variables)
        found, mark, _ = text.rpartition(_LAST)
        if not mark:
            problem = f"the template of {self.source} does not show the text of the last message"
            raise RequestError(f"rendering a chat: {problem}. Change that message.", field="messages")
        return found

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for messages. Encode it without special tokens: they are written out in it.

        `variables` are further names that the template knows, such as Qwen3's `enable_thinking`.
        """
        if self._template is None:
            problem = f"{self.source} has no chat template"
            raise RequestError(f"rendering a chat: {problem}. Send a prompt instead of messages.", field="messages")
        self._refuse_unread(variables or {})
        known = {**self._special_tokens, **(variables or {})}
        known |= {"tools": None if tools is None else [dict(tool) for tool in tools]}
        known |= {"add_generation_prompt": add_generation_prompt, "documents": None}
        checked = _checked(messages)
        if not any(self.mentions(f"{quote}developer{quote}") for quote in ("'", '"')):
            # The newer name of a system message: a template that does not know it would show a role that is new to
            # the model, or leave the message out.
            checked = [{**one, "role": "system"} if one["role"] == "developer" else one for one in checked]
        try:
            return self._template.render(known, messages=checked)
        except TypeError:
            # Some templates detect tool calls by a content of None, others join all contents.
            texts = [{**message, "content": message["content"] or ""} for message in checked]
        except Exception as error:  # a template can raise anything
            raise self._refusal(error) from None
        try:
            return self._template.render(known, messages=texts)
        except Exception as error:
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> RequestError:
        """What a template says against the messages is for who sent them; any other error may be its own fault."""
        if isinstance(error, _RefusedByTemplateError):
            problem = f"the template of {self.source} refuses the messages: {error}. Change them."
        else:
            problem = (
                f"the template of {self.source} failed with {type(error).__name__}: {error}. Correct the template, "
                "or give another; or send messages of a form that it knows."
            )
        return RequestError(f"rendering a chat: {problem}", field="messages")

    def _refuse_unread(self, variables: Mapping[str, object]) -> None:
        """Refuse names that the template never reads: they would do nothing, in silence."""
        unread = sorted(set(variables) - self.variables)
        if unread:
            reads = ", ".join(sorted(self.variables)) or "none"
            problem = f"the template of {self.source} does not read {unread[0][:100]!r}; what it reads: {reads}"
            raise RequestError(f"chat_template_kwargs: {problem}. Leave it out.", field="chat_template_kwargs")


def _checked(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as templates expect them; refuses what has no role or no text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("rendering a chat: there are no messages. Send a list with at least one.", field="messages")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: Message) -> dict[str, object]:
    place = f"messages[{index}]"
    doing = f"rendering a chat: {place}"
    if not isinstance(message, Mapping):
        found = type(message).__name__
        raise RequestError(f"{doing} is a {found}; expected an object with role and content.", field=place)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        expected = ", ".join(ROLES)
        raise RequestError(f"{doing} has the role {repr(role)[:100]}; expected one of {expected}.", field=place)
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        problem = "has no content; only an assistant's message with tool_calls may have none"
        raise RequestError(f"{doing} {problem}.", field=place)
    if isinstance(content, list):
        return {**message, "content": "\n".join(_text_of(place, part) for part in content)}
    if not isinstance(content, str | None):
        found = type(content).__name__
        problem = f"has content of type {found}; expected a string or a list of text parts"
        raise RequestError(f"{doing} {problem}.", field=place)
    return dict(message)


def _text_of(place: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        problem = f"has a part of type {repr(kind)[:100]}; the model reads text only: expected text parts alone"
        raise RequestError(f"rendering a chat: {place} {problem}.", field=place)
    return text


def _read_template(folder: Path) -> str | None:
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if not (path := folder / "tokenizer_config.json").is_file():
        return None
    fields = Fields.from_json(path)
    found = fields.values.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
        if not isinstance(found, str):
            names = ", ".join(map(str, named))
            raise CheckpointError(f"reading {path}: chat_template has {names}; expected one named default. Rename one.")
    return fields.text("chat_template") if found is not None and not isinstance(found, str) else found


def _compiled(template: str, source: str) -> jinja2.Template:
    """The template in a sandbox, with the names that templates written for `transformers` expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"opening the chat template of {source}: {error}. Correct or remove it.") from None


def _names_in(template: str) -> frozenset[str]:
    """The names that a template expects to be given."""
    return frozenset(meta.find_undeclared_variables(_parsed(template))) - set(jinja2.Environment().globals)


def _fields_in(template: str) -> frozenset[str]:
    """Every name that a template may read of an object: attributes, and texts, which may be keys."""
    parsed = _parsed(template)
    attributes = {node.attr for node in parsed.find_all(nodes.Getattr)}
    return frozenset(attributes | {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)})


def _shows_tools_whole(template: str) -> bool:
    """Whether a tool, or its function, is handed on as a whole: written, filtered, walked over, or given to a macro."""
    parsed, names = _parsed(template), {"tools"}
    named = [(loop.target, loop.iter) for loop in parsed.find_all(nodes.For)]
    named += [(one.target, one.node) for one in parsed.find_all(nodes.Assign)]
    for _ in range(3):  # a name may be of a name that is set below it
        for target, value in named:
            if isinstance(target, nodes.Name) and _is_tool(value, names):
                names.add(target.name)
    handed: list[nodes.Node | None] = [one for node in parsed.find_all(nodes.Output) for one in node.nodes]
    handed += [node.node for node in parsed.find_all(nodes.Filter) if node.name not in ("length", "count")]
    for call in parsed.find_all(nodes.Call):
        handed += [*call.args, *(one.value for one in call.kwargs)]
        handed += [call.node.node] if isinstance(call.node, nodes.Getattr) and call.node.attr == "items" else []
    return any(_is_tool(one, names) for one in handed)


def _is_tool(found: nodes.Node | None, names: Set[str]) -> bool:
    """Whether an expression is `tools`, one of them, or the function of one, where these names are."""
    match found:
        case nodes.Name():
            return found.name in names
        case nodes.Getattr(attr="function") | nodes.Filter():
            return _is_tool(found.node, names)
        case nodes.Getitem(arg=nodes.Const(value=str() as key)) if key != "function":
            return False
        case nodes.Getitem():
            return _is_tool(found.node, names)
    return False


def _parsed(template: str) -> nodes.Template:
    return jinja2.Environment(extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]).parse(template)


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training; here it is only what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own name and type)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _RefusedByTemplateError(jinja2.TemplateError):
    """A template's own `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
