"""What the server shows: page/ plays the memory of an engine, recorded or live."""
