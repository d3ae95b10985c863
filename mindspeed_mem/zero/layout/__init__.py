"""Which parameters lie in which chunk, by their sizes alone."""
