"""What is to be planned, and how it is made from a profile or from a model's shape."""
