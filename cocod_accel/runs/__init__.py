"""The run folder: writing it, reading it, its spans and tables."""
