"""A package, so that spawned ranks import a test module as tests.<folder>.<module> from here, and from nowhere else."""
