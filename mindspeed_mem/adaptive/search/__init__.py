"""The search for the best plan of a problem."""
