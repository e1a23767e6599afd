"""Responses API: OpenAI's `/v1/responses`, on top of chat completions."""
