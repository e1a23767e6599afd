"""Server: the OpenAI API, metrics and the status page."""
