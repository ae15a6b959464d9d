"""Memory: measured (``measure``), and predicted before a run: table → simulator → planner."""
