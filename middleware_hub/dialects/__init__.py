"""The dialects of clients: each is read into a `ChatRequest` and written from `Answer`s."""
