"""What is counted and timed while operators run: for profiles, reports and the ops table."""
