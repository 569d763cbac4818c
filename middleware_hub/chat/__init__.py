"""Code that dialects and sessions share: messages and their keys, answers, errors, and the interface of a dialect."""
