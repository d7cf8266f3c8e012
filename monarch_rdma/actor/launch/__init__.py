"""Worker processes: started from a warmed template, placed, watched, and read from."""
