"""Steps that run out of device memory and go on all the same."""
