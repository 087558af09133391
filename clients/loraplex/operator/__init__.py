"""The operator: it brings the adapter store to what LoraAdapter and BaseModel objects of Kubernetes ask for."""
