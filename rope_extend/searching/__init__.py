"""Search for frequency divisors: the space, the strategies, the evaluations and their log."""
