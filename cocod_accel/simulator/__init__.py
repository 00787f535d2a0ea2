"""A cluster in virtual time: the trainer's rounds and rows without the cluster."""
