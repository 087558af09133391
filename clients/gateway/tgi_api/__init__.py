"""The protocol of LoRAX and TGI: generate, info, tokenize."""
