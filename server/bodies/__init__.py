"""Contents of requests and answers: JSON schemas of bodies, chat messages, tools, and the parts of a generated text."""
