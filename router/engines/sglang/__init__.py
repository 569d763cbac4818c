"""SGLang's JSON: requests, replies, streams, KV events. No other package knows it. Pure code, which the hub imports, too."""
