"""What is averaged and how: parts of a model, codecs, rules, weights."""
