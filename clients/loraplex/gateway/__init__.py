"""The HTTP gateway: a client of routers that serves the protocols of OpenAI, Anthropic, and LoRAX and TGI."""
