"""Answers of real processes with the model of examples/, in float32."""
