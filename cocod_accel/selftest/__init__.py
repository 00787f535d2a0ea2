"""``cocod selftest``: whether everything is right on the devices of this machine.

workers.py             starts the workers, and names those that fail
worker.py              one of them: runs the checks in order
checks.py              the checks; each returns a figure and whether it is as it must be
serial.py              N workers in one process, written out, for the results to be compared with
overlap.py             how much of a transfer lies beside computing, and its trace
results.py             the table and the files
"""
