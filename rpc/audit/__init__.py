"""Records for the audit log: calls that change something, and callers that were refused."""
