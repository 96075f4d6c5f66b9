"""The contents of requests and answers: schemas, chats, tools, and the parts of a generated text."""
