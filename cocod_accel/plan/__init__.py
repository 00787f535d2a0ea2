"""``cocod plan``: measure the cluster that is there, or take one from a file, and say what to train on it with."""
