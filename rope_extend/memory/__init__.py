"""Memory estimates: dry runs on the meta device and budgets of devices."""
