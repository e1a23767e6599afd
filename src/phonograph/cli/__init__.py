"""The command line: generate, chat, explain."""
