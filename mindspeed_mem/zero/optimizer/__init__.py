"""The optimizer's step for masters that rest in different places."""
