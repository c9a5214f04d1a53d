"""From "I want 32k" to a recipe: what a model reads already, which method, how much memory and how long."""
