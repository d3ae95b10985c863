"""The command ``chunks``."""
