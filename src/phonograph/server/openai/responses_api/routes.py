"""ResponsesApi: routes of `/v1/responses`, on top of chat completions, with a store."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgspec
from starlette import responses
from starlette.requests import Request

from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.errors import RequestError
from phonograph.server.http import request_limits as limits
from phonograph.server.http.access import owner_of
from phonograph.server.http.failures import ApiError, unknown_field
from phonograph.server.openai import requests
from phonograph.server.openai.answer_reader import Reading
from phonograph.server.openai.api import Api
from phonograph.server.openai.chat_plan import ChatPlan, planned
from phonograph.server.openai.request_validation import check_chat
from phonograph.server.openai.responses_api.conversation import messages_of, messages_of_output, with_instructions
from phonograph.server.openai.responses_api.objects import DeletedResponse, ItemList, Response
from phonograph.server.openai.responses_api.request import ONLY_NEUTRAL, ResponsesRequest
from phonograph.server.openai.responses_api.store import ResponseStore, StoredResponse
from phonograph.server.openai.responses_api.translation import chat_of, described, in_words_of_responses, notes_of
from phonograph.server.openai.responses_api.writer import ResponsesWriter
from phonograph.server.options import ServerOptions

Message = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_decode_objects = msgspec.json.Decoder(list[dict[str, Any]]).decode
_MOST_ITEMS = 100
"""Of one list of input items, as at OpenAI."""


@dataclass(frozen=True)
class _Asked:
    """A request for a response, with the conversation that it continues."""

    body: ResponsesRequest
    messages: Sequence[Message]
    """Without instructions."""
    size: int = 0
    """About how many characters all have."""

    def from_turn(self, place: int) -> _Asked:
        """The same without messages before this index, except leading system messages."""
        fixed = next((at for at, one in enumerate(self.messages) if one["role"] not in ("system", "developer")), 0)
        return replace(self, messages=[*self.messages[:fixed], *self.messages[max(fixed, place) :]])

    @property
    def turns(self) -> list[int]:
        """Indices of user messages, each of which begins a turn."""
        return [at for at, message in enumerate(self.messages) if message["role"] == "user"]


class ResponsesApi:
    """Serves responses over the chats of an `Api`."""

    def __init__(self, api: Api, llm: AsyncLLM, options: ServerOptions) -> None:
        self._api = api
        self._llm = llm
        self._store = ResponseStore(options.response_store_bytes, options.response_store_seconds)
        self._has_keys = bool(options.api_keys)
        self._bodies = api.reader(ResponsesRequest, {**requests.ONLY_NEUTRAL, **ONLY_NEUTRAL})

    async def create(self, request: Request) -> responses.Response:
        """Generate a response."""
        self._llm.refuse_unless_ready()
        api, owner = self._api, self._owner(request)
        with api.refusals_counted():
            (asked, model), size = await self._bodies.read(request, self._llm.text.off_loop, self._checked)
            body = asked.body
            asked = await self._with_what_came_before(owner, replace(asked, size=size))
            with _in_words_of_responses():
                plan, prompt, reading, asked = await self._fitted(asked)
        is_stored = body.store is not False and self._store.is_on
        begun = Response(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            model=model,
            output=[],
            **described(body, is_stored=is_stored),
        )

        def ended(response: Response) -> Response:
            return self._kept(owner, asked, response) if response.store else response

        logprobs = api.logprobs() if plan.params.logprobs is not None else None
        writer = ResponsesWriter(begun, logprobs, reading, ended, asked.size)
        plan = replace(plan, notes=(*plan.notes, *notes_of(body)))
        return await api.deliver(request, [prompt], plan.params, writer, stream=bool(body.stream), plan=plan)

    def _checked(self, body: ResponsesRequest) -> tuple[_Asked, str]:
        """The request, checked against its limits, and the name of the model."""
        bounds = self._api.bounds()
        limits.LABEL_CHARS.check(len(body.previous_response_id or ""), "previous_response_id")
        limits.INCLUDES.check(len(body.include or ()))
        if not isinstance(body.input, str):
            limits.MESSAGES.check(len(body.input), "input")
        bounds.prompt_chars.check_size(body.input, "input")
        bounds.prompt_chars.check(len(body.instructions or ""), "instructions")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "`stream_options` needs `stream`: true.", param="stream_options", code="invalid_value")
        return _Asked(body, messages_of(body.input)), self._api.checked_model(body.model)

    async def _with_what_came_before(self, owner: bytes, asked: _Asked) -> _Asked:
        """The request with the messages of the response that it names."""
        previous = asked.body.previous_response_id
        if previous is None:
            return asked
        stored = self._stored(owner, previous, "previous_response_id")
        size = asked.size + len(stored.messages)
        before = await self._llm.text.off_loop(size, lambda: _decode_objects(stored.messages))
        return replace(asked, messages=[*before, *asked.messages], size=size)

    async def _fitted(self, asked: _Asked) -> tuple[ChatPlan, list[int], Reading, _Asked]:
        """The plan and the prompt; with `truncation`, without the oldest turns where not all of them fit."""
        try:
            return await self._planned(asked)
        except ApiError as error:
            turns = asked.turns
            if asked.body.truncation != "auto" or not _is_too_long(error) or len(turns) < 2:
                raise
        low, high = 1, len(turns) - 1  # the least number of turns to leave out, by bisection
        while low < high:
            middle = (low + high) // 2
            try:
                await self._planned(asked.from_turn(turns[middle]))
                high = middle
            except ApiError as error:
                if not _is_too_long(error):
                    raise
                low = middle + 1
        return await self._planned(asked.from_turn(turns[low]))

    async def _planned(self, asked: _Asked) -> tuple[ChatPlan, list[int], Reading, _Asked]:
        llm, api = self._llm, self._api
        max_len = llm.about.limits.max_len

        def work() -> ChatPlan:
            chat = chat_of(asked.body, with_instructions(asked.body.instructions, asked.messages))
            check_chat(chat, api.bounds())
            plan = planned(chat, llm.text.template, api.formats, max_len)
            if plan.params.logprobs is not None:
                entries = min(plan.params.max_tokens, max_len) * (1 + plan.params.logprobs)
                limits.RESPONSE_LOGPROBS.check(entries, "include")
            return plan

        plan = await llm.text.off_loop(asked.size, work)
        if (grammar := plan.params.grammar) is not None and grammar.field == "response_format":
            plan = replace(plan, params=replace(plan.params, grammar=replace(grammar, field="text.format")))
        prompt, reading = await api.rendered(plan, asked.size)
        api.check_context(prompt, "messages", plan.params.max_tokens)
        return plan, prompt, reading, asked

    # -- what is kept -----------------------------------------------------------------------------------------------

    def _kept(self, owner: bytes, asked: _Asked, response: Response) -> Response:
        """The response, stored unless it is too large."""
        messages = [*asked.messages, *messages_of_output(response.output)]
        entry = StoredResponse(_encode(response), _encode(_items(response.id, asked.body.input)), _encode(messages))
        if self._store.put(owner, response.id, entry):
            return response
        return msgspec.structs.replace(response, store=False)

    async def stored(self, request: Request) -> responses.Response:
        """A response that was stored, or its end."""
        return await (self._delete(request) if request.method == "DELETE" else self._retrieve(request))

    async def _retrieve(self, request: Request) -> responses.Response:
        _check_query(request, ())
        stored = self._stored(self._owner(request), request.path_params["id"])
        return responses.Response(stored.body, media_type="application/json")

    async def _delete(self, request: Request) -> responses.Response:
        name = request.path_params["id"]
        if not self._store.delete(self._owner(request), name):
            self._refuse_missing(name)
        return responses.Response(_encode(DeletedResponse(name)), media_type="application/json")

    async def input_items(self, request: Request) -> responses.Response:
        """The items of a response's input."""
        given = _check_query(request, ("limit", "order", "after", "before"))
        stored = self._stored(self._owner(request), request.path_params["id"])
        found = await self._llm.text.off_loop(len(stored.items), lambda: _listed(_decode_objects(stored.items), given))
        return responses.Response(_encode(found), media_type="application/json")

    def _stored(self, owner: bytes, id: str, param: str | None = None) -> StoredResponse:
        return self._store.get(owner, id) or self._refuse_missing(id, param)

    def _refuse_missing(self, id: str, param: str | None = None) -> NoReturn:
        if not self._store.is_on:
            because = "this server stores none (--response-store-bytes 0)"
        else:
            because = "it was not stored, was deleted, belongs to another API key, or has expired"
        message = f"there is no response {id[:100]!r}: {because}."
        code = "previous_response_not_found" if param else "response_not_found"
        raise ApiError(404, message, param=param, code=code)

    def _owner(self, request: Request) -> bytes:
        return owner_of(request.headers) if self._has_keys else b""


def _is_too_long(error: ApiError) -> bool:
    return error.error.code == "context_length_exceeded" or (
        error.error.code == "limit_exceeded" and error.error.param == "messages"
    )


@contextmanager
def _in_words_of_responses() -> Iterator[None]:
    try:
        yield
    except (ApiError, RequestError) as error:
        raise in_words_of_responses(error) from None


def _items(id: str, given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The input as items with ids."""
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    base = id.partition("_")[2]
    return [
        {"type": "message", **item, "id": item.get("id") or f"item_{base}_{place}"} for place, item in enumerate(given)
    ]


def _check_query(request: Request, known: Sequence[str]) -> dict[str, str]:
    for name in request.query_params:
        if name not in known:
            raise unknown_field(name, known)
    return dict(request.query_params)


def _listed(items: list[dict[str, Any]], given: Mapping[str, str]) -> ItemList:
    """A page of the items, the newest first by default."""
    limit, order = given.get("limit", "20"), given.get("order", "desc")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_ITEMS:
        raise ApiError(400, f"`limit` must be from 1 to {_MOST_ITEMS}.", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise ApiError(400, "`order` must be asc or desc.", param="order", code="invalid_value")
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    start = _place(ids, given, "after") + 1 if "after" in given else 0
    end = _place(ids, given, "before") if "before" in given else len(ids)
    found = ordered[start:end]
    page = found[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(page, first, last, len(found) > len(page))


def _place(ids: Sequence[str], given: Mapping[str, str], name: str) -> int:
    if given[name] not in ids:
        raise ApiError(400, f"`{name}` names no item of this response.", param=name, code="invalid_value")
    return ids.index(given[name])
