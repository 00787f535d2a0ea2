"""Workers that come and go: who is there, averages with whoever is, and what a worker that comes later gets from others."""
