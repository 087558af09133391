"""What every process tells of itself: set-up of logs, metrics and traces."""
