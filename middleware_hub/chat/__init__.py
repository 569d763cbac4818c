"""What dialects and sessions share: messages and their keys, answers, errors, and what a dialect provides."""
