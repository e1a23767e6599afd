"""The table of fields in docs/serving.md, made from the types that bodies are read with.

`python tests/field_table.py` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from phonograph.server.http.neutral_fields import NeutralField
from phonograph.server.openai import embeddings, requests
from phonograph.server.openai.responses_api import request as responses

BEGIN, END = "<!-- fields: made by tests/field_table.py -->", "<!-- end of fields -->"

OPENAI = {
    "completions": """best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed
        stop stream stream_options suffix temperature top_p user""",
    "chat": """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
        messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
        stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity
        web_search_options""",
    "responses": """access_programs background context_management conversation image include input instructions
        max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt
        prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store
        stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user""",
    "embeddings": "dimensions encoding_format input model user",
}
"""By route, what OpenAI documents."""

_OF_BOTH = """add_special_tokens allowed_token_ids bad_words cache_salt guided_choice guided_decoding_backend
    guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty logits_processors min_p min_tokens mm_processor_kwargs priority prompt_logprobs
    repetition_penalty request_id return_token_ids return_tokens_as_token_ids skip_special_tokens
    spaces_between_special_tokens stop_token_ids structural_tag structured_outputs top_k truncate_prompt_tokens
    use_beam_search vllm_xargs"""
VLLM = {
    "completions": f"{_OF_BOTH} prompt_embeds response_format",
    "chat": f"""{_OF_BOTH} add_generation_prompt best_of chat_template chat_template_kwargs continue_final_message
        documents echo include_reasoning media_io_kwargs""",
    "embeddings": "add_special_tokens normalize priority truncate_prompt_tokens",
}
"""By route, what vLLM takes beyond that."""


@dataclass(frozen=True)
class Route:
    """How the fields of its bodies are read."""

    body: type[msgspec.Struct]
    neutral: Mapping[str, NeutralField]
    unread: Sequence[str]
    conditions: Mapping[str, str]
    """Of fields that are read to be refused at some values."""

    def fate(self, name: str) -> str:
        """What becomes of a field, in a few words."""
        if name in self.conditions:
            return self.conditions[name]
        if name in self.body.__struct_fields__:
            return "no effect" if name in self.unread else "yes"
        if name not in self.neutral:
            return "refused"
        values = [*self.neutral[name].values, None]
        return "only " + " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)


ROUTES = {
    "completions": Route(
        requests.CompletionRequest,
        requests.ONLY_NEUTRAL,
        tuple(requests.WITHOUT_EFFECT),
        {"suffix": "only empty", "best_of": "only as `n`"},
    ),
    "chat": Route(requests.ChatRequest, requests.ONLY_NEUTRAL, tuple(requests.WITHOUT_EFFECT), {}),
    "responses": Route(
        responses.ResponsesRequest,
        {**requests.ONLY_NEUTRAL, **responses.ONLY_NEUTRAL},
        tuple(name for name in requests.WITHOUT_EFFECT if name not in ("metadata", "store")),
        {},
    ),
    "embeddings": Route(
        embeddings.EmbeddingRequest,
        embeddings.NEUTRAL_FOR_EMBEDDINGS,
        ("user",),
        {"dimensions": "only the model's own"},
    ),
}


def table() -> str:
    """All fields of OpenAI's, then vLLM's, then our own, and what becomes of each."""
    columns = {name: set(fields.split()) for name, fields in OPENAI.items()}
    beyond = {name: set(fields.split()) - columns[name] for name, fields in VLLM.items()}
    known = {name: columns[name] | beyond.get(name, set()) for name in columns}
    own = {name: set(route.body.__struct_fields__) - known[name] for name, route in ROUTES.items()}
    lines = []
    for title, of in (("OpenAI's", columns), ("vLLM's, beyond those", beyond), ("beyond both", own)):
        lines += ["", f"| {title} | {' | '.join(ROUTES)} |", f"| --- |{' --- |' * len(ROUTES)}"]
        for field in sorted(set().union(*of.values())):
            fates = [route.fate(field) if field in of.get(name, ()) else "" for name, route in ROUTES.items()]
            lines.append(f"| `{field}` | {' | '.join(fates)} |")
    return "\n".join([BEGIN, *lines, "", END])


if __name__ == "__main__":
    print(table())
