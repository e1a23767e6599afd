"""Responses API: `/v1/responses` of OpenAI, over the same chats."""
