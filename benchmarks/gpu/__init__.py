"""The checks and measurements of `make gpu`, in sections that run alone."""
