"""OutputForm: vLLM's response options: special tokens, stop strings, token ids, usage in every event."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.engine.text.reader import TextForm
from phonograph.server.http.failures import ApiError
from phonograph.server.openai.requests import SamplingFields


@dataclass(frozen=True)
class OutputForm:
    """What a request asks for besides text; the names of the fields are vLLM's."""

    text: TextForm = TextForm()
    with_ids: bool = False
    """Show the token ids of prompt and output."""
    names_ids: bool = False
    """In logprobs, show tokens as `token_id:…`."""
    counts_on: bool = False
    """Count tokens in every event."""


def output_form(request: SamplingFields, *, has_logprobs: bool) -> OutputForm:
    """The form that a request asks for."""
    if request.return_tokens_as_token_ids and not has_logprobs:
        field = "return_tokens_as_token_ids"
        message = f"`{field}` needs `logprobs`: it sets how their tokens are shown. Leave it out, or send `logprobs`."
        raise ApiError(400, message, param=field, code="invalid_value")
    streaming = request.stream_options if request.stream else None
    return OutputForm(
        TextForm(with_special=request.skip_special_tokens is False, with_stop=bool(request.include_stop_str_in_output)),
        with_ids=bool(request.return_token_ids),
        names_ids=bool(request.return_tokens_as_token_ids),
        counts_on=streaming is not None and streaming.continuous_usage_stats,
    )
