"""Many workers without their machines: N workers' real optimisation in one process."""
