"""The proof of speed: training loops on a link that really is slow, beside what users would pick instead."""
