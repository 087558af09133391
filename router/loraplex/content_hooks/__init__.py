"""Content hooks: a service of the operator's that checks prompts and answers. A router loads `hook` by its name."""
