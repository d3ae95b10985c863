"""Activation swap: which operator saved what, where its bytes are, and when they move."""
