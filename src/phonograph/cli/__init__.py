"""Command line: generate, chat, serve, explain, bench."""
