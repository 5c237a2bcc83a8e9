"""How bytes move between ranks: one file per transport, each behind the `Link` protocol of `hostring.transports.link`."""

if __name__ != "hostring.transports":  # a second copy under the bare name would have its own classes and registries
    raise ImportError("import hostring.transports, not transports")
