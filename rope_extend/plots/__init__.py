"""Pictures: one style, and the figures by what they show."""
