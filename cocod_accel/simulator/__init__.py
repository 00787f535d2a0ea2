"""Many workers without their machines: the trainer's rounds on a virtual clock, and what N workers learn, in one process."""
