"""The HTTP/1.1 client towards the workers: httptools on connections that are kept."""
