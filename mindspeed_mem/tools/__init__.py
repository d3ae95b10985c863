"""The command line, a file for each command: its options, what it does, and what it prints."""
