"""SGLang's JSON: requests, replies, streams, KV events. No other place knows it. Pure code, which the hub imports, too."""
