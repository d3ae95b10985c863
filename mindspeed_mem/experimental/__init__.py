"""What has never run on the device it is for: it may change or go, and nothing needs it."""
