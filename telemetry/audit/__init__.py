"""The audit log: who changed what, and who was refused, in a file that shows when it has been altered."""
