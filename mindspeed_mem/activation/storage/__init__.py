"""What happens to a storage that backward needs: its record, where that lies, and the copies that move it."""
