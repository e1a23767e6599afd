"""OpenAI API: request and response bodies, and their translation to and from the engine."""
