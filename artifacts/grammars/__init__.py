"""Grammars of answers: routers build them from a request's format, workers compile them; both prove them first."""
