"""How bytes move between ranks: one file per transport, all behind the `Link` protocol; `registry` names them."""

if __name__ != "hostring.transports":  # a second copy under the bare name would have its own classes and registries
    raise ImportError("import hostring.transports, not transports")
