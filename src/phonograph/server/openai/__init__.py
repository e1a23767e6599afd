"""OpenAI API: requests, responses, and the way between them and the engine."""
