"""OpenAI routes: completions, chat completions, embeddings, tokenize and detokenize."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phonograph.engine.process.async_llm import AsyncLLM
from phonograph.engine.process.messages import Ready
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.scheduling.admission import NO_EMBEDDINGS
from phonograph.errors import RequestError
from phonograph.server.http.bodies import Arrivals, BodyReader
from phonograph.server.http.failures import ApiError
from phonograph.server.http.neutral_fields import NeutralField
from phonograph.server.http.request_limits import ModelBounds
from phonograph.server.http.request_log import RequestLog
from phonograph.server.openai.answer_reader import Reading
from phonograph.server.openai.chat_plan import AnswerFormats, ChatPlan, check_continued, checked_tools, planned
from phonograph.server.openai.delivery import Delivery
from phonograph.server.openai.echo import echoes
from phonograph.server.openai.embeddings import (
    NEUTRAL_FOR_EMBEDDINGS,
    EmbeddingRequest,
    EmbeddingWriter,
    check_embeddings,
    inputs_at_fault,
)
from phonograph.server.openai.logprobs import LogprobWriter, TextOffsets
from phonograph.server.openai.output_form import OutputForm, output_form
from phonograph.server.openai.prompt_writer import PromptWriter
from phonograph.server.openai.request_validation import (
    check_chat,
    check_completion,
    check_detokenize,
    check_logprobs,
    check_message_fields,
    check_tokenize,
    check_tokenize_fields,
)
from phonograph.server.openai.requests import (
    ONLY_NEUTRAL,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from phonograph.server.openai.responses import (
    DetokenizeResponse,
    TokenizeResponse,
)
from phonograph.server.openai.sampling_params import completion_params
from phonograph.server.openai.token_ids import TokenIds
from phonograph.server.openai.tool_choice import choice_of
from phonograph.server.openai.tool_formats import JSON
from phonograph.server.openai.tool_messages import for_template
from phonograph.server.openai.writers import ChatWriter, CompletionWriter, Head, ResponseWriter
from phonograph.server.options import ServerOptions

T = TypeVar("T", bound=msgspec.Struct)

_BODIES = 32
"""Bodies of the largest size that may be received at a time."""

_encode = msgspec.json.Encoder().encode


class Api:
    """Serves one AsyncLLM."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.names = options.names or (llm.arguments.name,)
        self._llm = llm
        self._options = options
        self._logprobs: dict[tuple[bool, bool], LogprobWriter] = {}
        """By vLLM's fields that change how tokens are shown; each caches token texts."""
        self._arrivals = Arrivals(_BODIES * options.max_body_bytes)
        self._bounds: tuple[Ready, ModelBounds] | None = None
        self._completion_bodies = self.reader(CompletionRequest, ONLY_NEUTRAL)
        self._chat_bodies = self.reader(ChatRequest, ONLY_NEUTRAL)
        self._embedding_bodies = self.reader(EmbeddingRequest, NEUTRAL_FOR_EMBEDDINGS)
        self._tokenize_bodies = self.reader(TokenizeRequest)
        self._detokenize_bodies = self.reader(DetokenizeRequest)

    def reader(self, kind: type[T], neutral: Mapping[str, NeutralField] | None = None) -> BodyReader[T]:
        """Reads bodies of a kind, which may have `neutral` fields too."""
        options = self._options
        most, seconds = options.max_body_bytes, options.body_timeout
        return BodyReader(kind, most, seconds, self._arrivals, self.bounds, neutral or {})

    def bounds(self) -> ModelBounds:
        """Bounds of requests, for the model that is served."""
        about = self._llm.about
        if self._bounds is None or self._bounds[0] is not about:
            tokenizer = self._llm.tokenizer
            longest = tokenizer.longest_token if tokenizer is not None else 1
            most = self._options.max_prompt_chars
            self._bounds = about, ModelBounds.of(about.limits.max_len, longest, self._llm.max_active, most)
        return self._bounds[1]

    @cached_property
    def formats(self) -> AnswerFormats:
        """How the model writes tool calls and reasoning."""
        options, llm = self._options, self._llm
        return AnswerFormats.of(llm.text.template, llm.tokenizer, options.tool_parser, options.reasoning_parser)

    # -- generation -------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Complete one or several prompts."""
        self._llm.refuse_unless_ready()

        def checked(
            body: CompletionRequest,
        ) -> tuple[CompletionRequest, Head, SamplingParams, list[str] | list[list[int]]]:
            check_completion(body, self.bounds())
            return body, self._head("cmpl", body), completion_params(body), _prompts_of(body.prompt, "prompt")

        with self.refusals_counted():
            found, _ = await self._completion_bodies.read(request, self._llm.text.off_loop, checked)
            body, head, params, given = found
            most = self._most_tokens(body, params)
            special = body.add_special_tokens is not False
            check = self._fitting(params.max_tokens)
            prompts = await self._llm.text.encode(given, add_special=special, most=most, check=check)
            field = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
            check_logprobs(params, prompts, self._llm.about.limits.max_len, field)
            form = output_form(body, has_logprobs=body.logprobs is not None)
        logprobs, stream = self.logprobs(form), bool(body.stream)

        def offsets(choice: int) -> TextOffsets:
            return logprobs.offsets(prompts[choice // params.n], verbatim=params.grammar is not None)

        shown = None
        if body.echo or body.prompt_logprobs is not None:
            # A truncated prompt is echoed by its remaining tokens: the client's text has more.
            seen, text = given if most is None else prompts, self._llm.text
            echoed = await echoes(text.off_loop, self._llm.tokenizer, seen, prompts, params.n) if body.echo else None
            shown = PromptWriter(logprobs, echoed, body.logprobs, body.prompt_logprobs)
        writer = CompletionWriter(head, logprobs if body.logprobs is not None else None, offsets, shown)
        return await self.deliver(request, prompts, params, writer, stream=stream, priority=body.priority, form=form)

    async def chat(self, request: Request) -> Response:
        """Generate the next message of a conversation."""
        self._llm.refuse_unless_ready()
        max_len = self._llm.about.limits.max_len

        def checked(body: ChatRequest) -> tuple[ChatRequest, Head, ChatPlan]:
            check_chat(body, self.bounds())
            plan = planned(body, self._llm.text.template, self.formats, max_len)
            return body, self._head("chatcmpl", body), plan

        with self.refusals_counted():
            (body, head, plan), size = await self._chat_bodies.read(request, self._llm.text.off_loop, checked)
            params = plan.params
            special, most = bool(body.add_special_tokens), self._most_tokens(body, params)
            prompt, reading = await self.rendered(plan, size, add_special=special, most=most)
            self.check_context(prompt, "messages", params.max_tokens)
            check_logprobs(params, [prompt], max_len)
            form = output_form(body, has_logprobs=bool(body.logprobs))
        ranked, stream, logprobs = body.prompt_logprobs, bool(body.stream), self.logprobs(form)
        shown = None if ranked is None else PromptWriter(logprobs, num_ranked=ranked)
        writer = ChatWriter(head, logprobs if body.logprobs else None, reading, shown)
        return await self.deliver(
            request, [prompt], params, writer, stream=stream, priority=body.priority, plan=plan, form=form
        )

    def logprobs(self, form: OutputForm = OutputForm()) -> LogprobWriter:
        """The writer of logprobs in this form."""
        kind = form.text.with_special, form.names_ids
        if kind not in self._logprobs:
            self._logprobs[kind] = LogprobWriter(self._llm.tokenizer, with_special=kind[0], by_id=kind[1])
        return self._logprobs[kind]

    async def rendered(
        self, plan: ChatPlan, size: int, *, add_special: bool = False, most: int | None = None
    ) -> tuple[list[int], Reading]:
        """The rendered prompt of a chat of about so many characters, and how to parse the output."""
        text = self._llm.text
        prompt = await text.render(
            plan.messages,
            tools=plan.tools,
            variables=plan.variables,
            add_generation_prompt=plan.add_generation_prompt,
            continues=plan.continues,
            special_content=self._has_special_content(plan.content_special_tokens),
            add_special=add_special,
            most=most,
            size=size,
        )
        return await text.off_loop(size, lambda: plan.rendered(prompt, text.tokenizer))

    def _has_special_content(self, asked: str | None) -> bool:
        return (asked or self._options.content_special_tokens) == "special"

    async def embeddings(self, request: Request) -> Response:
        """Embed each input."""
        self._llm.refuse_unless_ready()
        if not self._llm.arguments.options.embeddings:
            raise ApiError(400, NO_EMBEDDINGS, code="unsupported")

        def checked(body: EmbeddingRequest) -> tuple[EmbeddingRequest, str, list[str] | list[list[int]]]:
            check_embeddings(body, self.bounds(), self._llm.checkpoint.config.hidden)
            return body, self.checked_model(body.model), _prompts_of(body.input, "input")

        with self.refusals_counted(), inputs_at_fault():
            found, _ = await self._embedding_bodies.read(request, self._llm.text.off_loop, checked)
            body, model, given = found
            inputs = await self._llm.text.encode(given, check=self._fitting(0, "input"))
        writer = EmbeddingWriter(f"embd-{uuid.uuid4().hex}", model, body)
        log, timeout = await self._logged(writer.id, inputs), self._options.request_timeout
        params, pooling = SamplingParams(max_tokens=0), body.pooling or "mean"
        with inputs_at_fault():
            generation = await self._llm.submit_long(
                inputs, params, request_id=writer.id, timeout=timeout, pooling=pooling
            )
        return await Delivery(generation, writer, log, timeout, self._llm.text.off_loop).whole(request)

    @contextmanager
    def refusals_counted(self) -> Iterator[None]:
        """Report requests that never reach the engine to the observer; the engine reports the others."""
        try:
            yield
        except (ApiError, RequestError):
            self._llm.observer.rejected("invalid")
            raise

    def _head(self, kind: str, body: SamplingFields) -> Head:
        with_usage = bool(body.stream and body.stream_options and body.stream_options.include_usage)
        return Head(f"{kind}-{uuid.uuid4().hex}", int(time.time()), self.checked_model(body.model), with_usage)

    def _most_tokens(self, body: SamplingFields, params: SamplingParams) -> int | None:
        """How many of a prompt's last tokens to keep."""
        most = body.truncate_prompt_tokens
        if most == 0:
            message = "`truncate_prompt_tokens` is 0, and nothing of the prompt would be left. Send 1 or more, or -1."
            raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid_value")
        return self._llm.about.limits.longest_prompt(params.max_tokens) if most == -1 else most

    def _fitting(self, max_outputs: int, field: str = "prompt") -> Callable[[Sequence[int]], None]:
        """Refuses prompts, one after the other: each one that is too long, and all together."""
        total, most = 0, self.bounds().prompt_tokens

        def check(prompt: Sequence[int]) -> None:
            nonlocal total
            self.check_context(prompt, field, max_outputs)
            total += len(prompt)
            most.check(total, field)

        return check

    def check_context(self, prompt: Sequence[int], param: str, max_outputs: int) -> None:
        """Refuse a prompt that does not fit the context with so many tokens of output."""
        limits = self._llm.about.limits
        if prompt and (problem := limits.misfit(len(prompt), max_outputs)):
            # OpenAI's wording: some clients match it to retry with a shorter prompt.
            problem = f"This model's maximum context length is {limits.max_len} tokens, and {problem}"
            raise ApiError(400, problem, param=param, code="context_length_exceeded")

    async def deliver(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        writer: ResponseWriter,
        *,
        stream: bool,
        priority: int | None = None,
        plan: ChatPlan | None = None,
        form: OutputForm = OutputForm(),
    ) -> Response:
        """Run the prompts, those of a chat by their plan, and deliver the outputs; the lowest priority goes first."""
        log, timeout = await self._logged(writer.id, prompts), self._options.request_timeout
        generation = await self._llm.submit_long(
            prompts,
            params,
            request_id=writer.id,
            priority=-(priority or 0),
            timeout=timeout,
            continues=plan is None or plan.continues,
            kept_ids=plan.reading.kept_tokens if plan is not None else (),
            form=form.text,
        )
        if isinstance(writer, ChatWriter | CompletionWriter):
            writer.ids = TokenIds(prompts if form.with_ids else (), params.n)
            writer.size = writer.ids.size
            writer.usage_so_far = (lambda: generation.usage) if form.counts_on else None
        notes = plan.notes if plan is not None else ()
        delivery = Delivery(generation, writer, log, timeout, self._llm.text.off_loop, notes)
        return await (delivery.stream(request) if stream else delivery.whole(request))

    async def _logged(self, name: str, prompts: Sequence[Sequence[int]]) -> RequestLog:
        """The log of a request, with its prompts where --log-prompts allows it."""
        log = RequestLog(name, with_texts=self._options.log_prompts)
        if self._options.log_prompts:
            for prompt in prompts:
                log.prompt(await self._text_of(prompt) if self._llm.tokenizer is not None else prompt)
        return log

    # -- text -------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt or of messages."""

        def checked(body: TokenizeRequest) -> TokenizeRequest:
            check_tokenize(body, self.bounds())
            check_message_fields(body.messages or (), self._llm.text.template.message_fields)
            check_continued(body.messages or (), body.add_generation_prompt, body.continue_final_message)
            self.checked_model(body.model)
            if (body.prompt is None) == (body.messages is None):
                found = "neither" if body.prompt is None else "both"
                message = f"expected either `prompt` or `messages`, found {found}. Send one of them."
                raise ApiError(400, message, param="prompt", code="invalid_value")
            check_tokenize_fields(body)
            return body

        body, size = await self._tokenize_bodies.read(request, self._llm.text.off_loop, checked)
        tokens: Sequence[int]
        if body.messages is not None:
            template = self._llm.text.template
            tools = checked_tools(choice_of("auto", body.tools).tools, template)
            messages, shown = for_template(body.messages, tools, template, self.formats.tools or JSON)
            tokens = await self._llm.text.render(
                messages,
                tools=shown,
                variables=body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
                continues=bool(body.continue_final_message),
                special_content=self._has_special_content(body.content_special_tokens),
                size=size,
            )
        else:
            (tokens,) = await self._llm.text.encode(
                [body.prompt or ""], add_special=body.add_special_tokens is not False
            )
        return _json(TokenizeResponse(len(tokens), self._llm.about.limits.max_len, tokens))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""

        def checked(body: DetokenizeRequest) -> DetokenizeRequest:
            check_detokenize(body, self.bounds())
            self.checked_model(body.model)
            return body

        body, _ = await self._detokenize_bodies.read(request, self._llm.text.off_loop, checked)
        return _json(DetokenizeResponse(await self._text_of(body.tokens)))

    async def _text_of(self, tokens: Sequence[int]) -> str:
        return await self._llm.text.decode(tokens, self._llm.about.vocab, skip_special=False)

    # -- what is served ---------------------------------------------------------------------------------------------

    def checked_model(self, name: str | None) -> str:
        """The name of the model in the response."""
        if name is not None and name not in self.names:
            message = f"the model {name[:100]!r} is not served here; expected {' or '.join(map(repr, self.names))}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]


def _prompts_of(prompt: str | Sequence[Any], field: str) -> list[str] | list[list[int]]:
    """Any accepted form of a prompt as a list of texts or of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        message = f"`{field}` mixes texts, token ids and lists of token ids. Send one kind."
        raise ApiError(400, message, param=field, code="invalid_value")
    return [list(prompt)] if kinds == {int} else list(prompt)


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(_encode(body), status, media_type="application/json")
