"""Files that every process may read: whether they have changed since."""
