"""What clients speak: each dialect is read into a `ChatRequest` and written from `Answer`s."""
