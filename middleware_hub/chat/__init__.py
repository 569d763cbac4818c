"""Messages, their keys and the errors of a conversation: the words that dialects and sessions share."""
