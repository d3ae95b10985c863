"""Chunks of plain torch modules."""
