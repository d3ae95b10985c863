"""A training run that plans for itself: from its profile to a settled plan."""
