"""Agent sessions: a trie of messages over exact tokens."""
