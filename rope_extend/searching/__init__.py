"""Search for frequency divisors: the space, the fitness, the log, and one file for each strategy."""
