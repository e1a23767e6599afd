"""HTTP: connections, access, bodies and their limits, failures; nothing of the OpenAI API."""
