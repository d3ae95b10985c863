"""Chunks, whoever made them: memory, gathering, order, gradients, passes."""
