"""Load client: for any OpenAI endpoint: what is sent, how it is timed, and what came of it."""
