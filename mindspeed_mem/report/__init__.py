"""Tables for people: what the memory engine did."""
