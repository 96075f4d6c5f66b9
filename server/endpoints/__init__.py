"""The endpoints of the server, by API: OpenAI, Anthropic and llama-server."""
