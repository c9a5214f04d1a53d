"""A study: one model under many methods, measured cell by cell, resumable, with a report and a verdict."""
