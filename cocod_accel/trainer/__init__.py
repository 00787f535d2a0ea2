"""One run on one worker: the process, the loop, resuming, measuring, watching."""
