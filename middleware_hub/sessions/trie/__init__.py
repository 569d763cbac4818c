"""The message trie: which tokens were sampled for which messages."""
