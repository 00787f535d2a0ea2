"""A run's configuration: typed settings, strict loading, and what is refused."""
