"""Batch files: requests in OpenAI's batch format, answered by the server's routes without a socket."""
